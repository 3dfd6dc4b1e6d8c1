"""What commands and image references say about versions, wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .places import Place, image_stem, is_version, package_stem, variable_stem

_PIN = re.compile(r"(?<![\w./-])([A-Za-z][A-Za-z0-9._-]*)(?:\[[^\]\s]*\])?==([0-9][A-Za-z0-9.+!_-]*)")
_IMAGE = re.compile(r"^(?:docker-image://)?((?:[\w.-]+(?::\d+)?/)*[a-z0-9][\w.-]*):(v?\d[\w.-]*)(?:@sha256:\w+)?$")
_BUILD_ARG = re.compile(r"--build-arg(?:[= ]|[\"'],?|\s)\s*(?:-\s)?\s*[\"']?([A-Za-z_]\w*)=[\"']?([^\s\"'$`{}\\,\]]+)")
_CLONE = re.compile(
    r"git\s+clone\b[^;&|\n]*?(?:--branch[= ]|-b\s+)[\"']?(v?\d[\w.+-]*)[^;&|]*?/([\w.-]+?)(?:\.git)?(?=[\s\"';&|]|$)"
)


def command(path: str, text: str, line: Callable[[int], int], scope: str) -> Iterator[Place]:
    """What a command line pins: packages, build arguments, a cloned tag, `X_VERSION=…`.

    `line` turns an offset in the text into a line of the file.
    """
    if "==" in text:
        for match in _PIN.finditer(text):
            yield Place(path, line(match.start()), "pin", match[1], match[2], package_stem(match[1]), scope)
    if "--build-arg" in text:
        for match in _BUILD_ARG.finditer(text):
            yield Place(path, line(match.start()), "build-arg", match[1], match[2], variable_stem(match[1]))
    if "clone" in text:
        for match in _CLONE.finditer(text):
            yield Place(path, line(match.start()), "git", match[2], match[1], package_stem(match[2]))


def image(path: str, line: int, text: str, kind: str = "image") -> Iterator[Place]:
    """An image reference whose tag begins with a version."""
    match = _IMAGE.match(text)
    if match is None:
        return
    repository = match[1].removeprefix("docker.io/").removeprefix("library/")
    version, _, flavour = match[2].partition("-")
    if is_version(version):
        yield Place(path, line, kind, repository, version, image_stem(repository), flavour)


def joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, each with the number of its first."""
    held, first = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        if not held:
            first = number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        yield first, held + line
        held = ""
    if held:
        yield first, held
