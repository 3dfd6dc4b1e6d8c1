"""Templates to files: no clock, no environment, no network.

templates/Dockerfile.j2            -> docker/Dockerfile
templates/requirements/host.in.j2  -> requirements/host.in
templates/_name.j2                 a part that other templates include, rendered to nothing itself
"""

from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.contract.errors import UsageError
from pipeline.contract.files import write_whole
from pipeline.contract.text import pluralize

from .findings import Finding, printable, suggest
from .requirements import read_bytes
from .source import FILE, Versions, WrittenInvalid

FOLDER = "templates"
END = ".j2"
_SECONDS = 5  # that one template may take; ours take milliseconds


class TemplatesInvalid(WrittenInvalid):
    """A template cannot be rendered; the findings are those on all of them."""

    subject, remedy = f"{FOLDER}/", f"correct {FOLDER}/ or {FILE}, then run `pipeline versions sync`"


def has_templates(root: Path) -> bool:
    """Whether a tree renders anything; one that does not may still be checked."""
    return (root / FOLDER).is_dir()


def render(root: Path, versions: Versions) -> dict[str, bytes]:
    """Every file that the templates give, by its path in the tree; raise `TemplatesInvalid` with every problem.

    A name without a version is a problem, and so is a template that is no text, or one that loops for ever. Templates
    may be another project's: they reach nothing but the versions.
    """
    from jinja2 import FileSystemLoader, StrictUndefined, TemplateNotFound, TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=FileSystemLoader(root / FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    findings: list[Finding] = []
    files: dict[str, bytes] = {}
    for name in sorted(path.relative_to(root / FOLDER).as_posix() for path in (root / FOLDER).rglob(f"*{END}")):
        place = f"{FOLDER}/{name}"
        try:
            text = read_bytes(root / place).decode()
            unknown = meta.find_undeclared_variables(environment.parse(text, name)) - set(versions)
            for word in sorted(unknown):
                line = next((n for n, row in enumerate(text.split("\n"), 1) if re.search(rf"\b{word}\b", row)), 0)
                findings.append(
                    Finding(place, line, f"{word} has no version in {FILE}{suggest(word, versions)}", "render")
                )
            if not unknown and not name.rpartition("/")[2].startswith("_"):
                with _time_limit():
                    files[target(name)] = environment.get_template(name).render(dict(versions)).encode()
            continue
        except TemplateSyntaxError as error:
            line, why = error.lineno, f"is not a template: {error.message}"
        except TemplateNotFound as error:
            line, why = 0, f"cannot be rendered: there is no {error.name}"
        except UnicodeDecodeError:
            line, why = 0, "is not UTF-8"
        except TimeoutError:
            line, why = 0, f"cannot be rendered: it takes over {pluralize(_SECONDS, 'second')}"
        except OSError as error:
            line, why = 0, f"cannot be read: {error.strerror}"
        except RecursionError:
            line, why = 0, "cannot be rendered: it includes itself"
        except Exception as error:  # noqa: BLE001 - what a template may raise has no end
            line, why = 0, f"cannot be rendered: {str(error) or type(error).__name__}"
        findings.append(Finding(place, line, why, "render"))
    if findings:
        raise TemplatesInvalid(sorted(set(findings)))
    return files


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise `TimeoutError` where a template does not end. By SIGALRM: rendering is the main thread's."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def target(template: str) -> str:
    """The path in the tree that a template (relative to templates/) is rendered to."""
    path = template.removesuffix(END)
    return path if "/" in path else f"docker/{path}"


def compare(root: Path, files: Mapping[str, bytes]) -> list[Finding]:
    """Committed files that are not, byte for byte, what the templates give; each with a unified diff."""
    findings = []
    for path, wanted in files.items():
        try:
            found = read_bytes(root / path)
        except FileNotFoundError:
            findings.append(Finding(path, 0, "is missing; `pipeline versions sync` writes it", "render"))
            continue
        except OSError as error:
            findings.append(Finding(path, 0, f"cannot be read: {error.strerror}", "render"))
            continue
        if found != wanted:
            diff = unified(path, found, wanted, "committed", "rendered")
            line = next(
                (n for n, pair in enumerate(zip(found.split(b"\n"), wanted.split(b"\n"), strict=False), 1)
                 if pair[0] != pair[1]),
                found.count(b"\n") + 1,
            )  # fmt: skip
            message = "differs from its template; run `pipeline versions sync`"
            findings.append(Finding(path, line, message, "render", diff))
    return findings


def sync(root: Path, versions: Versions) -> list[str]:
    """Render everything, then write what differs; return the changed paths. Nothing is written on any error."""
    if not has_templates(root):
        raise UsageError(f"there is no {FOLDER}/ in {root}", hint="`pipeline versions check` works without templates")
    return write(root, render(root, versions))


def write(root: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write what differs, whole, none outside of the tree; return the changed paths. Nothing changes on an error."""
    home = os.path.realpath(root)
    for path in files:
        if not Path(os.path.realpath(root / path)).is_relative_to(home):
            raise UsageError(f"{path} is a link out of the tree", hint="remove the link, then run the command again")
    before: dict[Path, bytes | None] = {}
    changed = []
    try:
        for path, data in files.items():
            place = root / path
            before[place] = read_bytes(place) if place.exists() else None
            mode = place.stat().st_mode & 0o777 if place.exists() else 0o644
            if write_whole(place, data, mode=mode):
                changed.append(path)
    except BaseException as error:
        for place, old in before.items():
            with suppress(OSError):
                if old is None:
                    place.unlink()
                else:
                    write_whole(place, old, mode=place.stat().st_mode & 0o777)
        if not isinstance(error, OSError):
            raise
        what = f"{path} cannot be written: {error.strerror}"
        raise UsageError(
            what, hint="make it an ordinary file that you may write, then run the command again"
        ) from error
    return changed


def unified(path: str, before: bytes, after: bytes, was: str, will: str) -> str:
    """A unified diff of two versions of a file, each named by a word."""
    old, new = (data.decode("utf-8", "backslashreplace").splitlines(keepends=True) for data in (before, after))
    shown = printable(path)
    lines = difflib.unified_diff(old, new, f"{shown} ({was})", f"{shown} ({will})")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
