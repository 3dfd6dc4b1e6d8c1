"""YAML, shell, Make and Python to places."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from pipeline.versions.shelltext import quiet
from pipeline.versions.texts import ENVIRON

from .commands import command, joined_lines, script_places
from .places import Place, is_version, variable_stem
from .readers import NotUnderstood

_ASSIGNED = re.compile(
    r"^\s*(?:export\s+|readonly\s+|local\s+|declare\s+-\w+\s+|set\s+)*"
    r"([A-Za-z_]\w*_VERSION)\s*[:?]?=\s*[\"']?(v?\d[\w.+!-]*)[\"']?\s*(?:$|[;#&])"
)
_FALLBACK = re.compile(r"\$\{([A-Za-z_]\w*_VERSION):?[-=](v?\d[\w.+!-]*)\}")
_PYTHON = re.compile(
    r"^[ \t]*([A-Z][A-Z0-9_]*_VERSION)(?:\s*:\s*[\w.\[\]]+)?\s*=\s*[\"'](v?\d[\w.+!-]*)[\"']\s*(?:#.*)?$", re.MULTILINE
)
_YAML_LINE = re.compile(
    r"^\s*(?:-\s+)?[\"']?([A-Za-z_]\w*_VERSION)[\"']?\s*:\s*[\"']?(v?\d[\w.+!-]*)[\"']?\s*(?:#.*)?$", re.IGNORECASE
)


def shell(path: str, text: str) -> Iterator[Place]:
    """Assignments of `X_VERSION`, fallbacks `${X_VERSION:-…}`, and what commands pin; for Make as well."""
    for number, line in joined_lines(quiet(text)):
        if "_VERSION" in line:
            match = _ASSIGNED.match(line)
            if match and is_version(match[2]):
                yield Place(path, number, "shell", match[1], match[2], variable_stem(match[1]))
            for match in _FALLBACK.finditer(line):
                yield Place(path, number, "shell", match[1], match[2], variable_stem(match[1]))
    yield from script_places(path, text)


def python(path: str, text: str) -> Iterator[Place]:
    """Constants `X_VERSION = "…"`, and what code falls back to where the environment has no `X_VERSION`."""
    starts = [0, *(end.end() for end in re.finditer("\n", text))]
    for match in (*_PYTHON.finditer(text), *ENVIRON.finditer(text)):
        if match[1].upper().endswith("_VERSION") and is_version(match[2]) and not _commented(text, match.start(1)):
            line = bisect_right(starts, match.start(1))
            yield Place(path, line, "python", match[1], match[2], variable_stem(match[1]))


def _commented(text: str, at: int) -> bool:
    return text[text.rfind("\n", 0, at) + 1 : at].lstrip().startswith("#")


def yaml(path: str, text: str) -> Iterator[Place]:
    """Keys `X_VERSION`, `image:` and every command line in a string; by lines where a template makes it no YAML."""
    import yaml as library

    from .yamltree import nodes

    loader = getattr(library, "CSafeLoader", library.SafeLoader)
    try:
        for document in library.compose_all(text, Loader=loader):
            yield from nodes(path, document)
    except (library.YAMLError, ValueError) as error:
        if "{{" not in text and "{%" not in text:
            mark = getattr(error, "problem_mark", None)
            at = f" (line {mark.line + 1})" if mark else ""
            raise NotUnderstood(f"not YAML: {getattr(error, 'problem', None) or error}{at}") from None
        for number, line in enumerate(text.split("\n"), 1):
            match = _YAML_LINE.match(line)
            if match and is_version(match[2]):
                yield Place(path, number, "yaml", match[1], match[2], variable_stem(match[1]))
            yield from command(path, line, lambda _, number=number: number, "script")  # type: ignore[misc]
