"""The whole check, in order: the source, the rendered files, what the files mean."""

from __future__ import annotations

from pathlib import Path

from .findings import Finding
from .meaning import collect, judge
from .render import has_templates, render
from .source import Versions, load
from .tree import Tree


def check(root: Path) -> list[Finding]:
    """Every disagreement in a tree, sorted; raise `SourceInvalid` or `TemplatesInvalid` where there is no telling."""
    versions = load(root)
    findings: list[Finding] = []
    if has_templates(root):
        findings += compare(root, versions)
    tree = Tree(root)
    findings += judge(versions, collect(tree, versions))
    return sorted(set(findings))


def compare(root: Path, versions: Versions) -> list[Finding]:
    """Committed files that are not, byte for byte, what the templates give; each with a unified diff."""
    findings = []
    for path, wanted in render(root, versions).files.items():
        try:
            found = (root / path).read_bytes()
        except FileNotFoundError:
            findings.append(Finding(path, 0, 0, "is missing; `pipeline sync` writes it", "render"))
            continue
        except OSError as error:
            findings.append(Finding(path, 0, 0, f"cannot be read: {error.strerror}", "render"))
            continue
        if found != wanted:
            diff = unified(path, found, wanted, "committed", "rendered")
            line = first_difference(found, wanted)
            findings.append(Finding(path, line, 0, "differs from its template; run `pipeline sync`", "render", diff))
    return findings


def first_difference(found: bytes, wanted: bytes) -> int:
    """The first line, from 1, in which two files differ."""
    pairs = zip(found.split(b"\n"), wanted.split(b"\n"), strict=False)
    return next((number for number, (one, two) in enumerate(pairs, 1) if one != two), found.count(b"\n") + 1)


def unified(path: str, before: bytes, after: bytes, was: str, will: str) -> str:
    """A unified diff of two versions of a file, each named by a word."""
    import difflib

    old, new = (data.decode("utf-8", "backslashreplace").splitlines(keepends=True) for data in (before, after))
    lines = difflib.unified_diff(old, new, f"{path} ({was})", f"{path} ({will})")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
