"""What commands and image references say about versions, wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from pipeline.versions.gitrefs import HELD, URL, Shell, refs
from pipeline.versions.relations import SUFFIX, canonical
from pipeline.versions.shelltext import script
from pipeline.versions.texts import AT, DOWNLOADED, PIN, file_in, repository_and_ref

from .places import Place, image_stem, is_version, package_stem, variable_stem

_IMAGE = re.compile(r"^(?:docker-image://)?((?:[\w.-]+(?::\d+)?/)*[a-z0-9][\w.-]*):(v?\d[\w.-]*)(?:@sha256:\w+)?$")
_BUILD_ARG = re.compile(r"--build-arg(?:[= ]|[\"'],?|\s)\s*(?:-\s)?\s*[\"']?([A-Za-z_]\w*)=[\"']?([^\s\"'$`{}\\,\]]+)")
_GIT = re.compile(r"\bgit\b.{0,200}\b(?:clone|checkout|switch|reset|fetch|pull)\b")
_NEAR = 300  # characters of a command before what it installs
_UV = re.compile(r"\buvx?\b")
_REF = re.compile(r"v?\d+\.\d[\w.+-]*")


# What a text with something to find holds at the least.
WORTH = r"==|--build-arg|git [^\n]{0,200}(?:clone|checkout|switch)|git\+|\.whl\b|\buv [^\n]{0,200}@|/archive/"


class Said(NamedTuple):
    """What a text says of a name, and the offset of it; the kinds are those of `Place`."""

    kind: str
    name: str
    value: str
    at: int


class _AnyVersion:
    """The names of versions: each is a place of its own where it is given a value."""

    def __contains__(self, name: object) -> bool:
        return str(name).upper().endswith(SUFFIX)


class Commands:
    """What commands pin: packages, build arguments, files and refs in addresses, tags that are cloned."""

    versions = _AnyVersion()

    def look(self, text: str, shell: Shell | None = None) -> Iterator[Said]:
        """Everything in one text, whose commands run where `shell` says."""
        yield from _pins(text)
        if "--build-arg" in text:
            for match in _BUILD_ARG.finditer(text):
                yield Said("build-arg", match[1], match[2], match.start())
        if "/" in text:
            for match in chain(URL.finditer(text), (one for one in HELD.finditer(text) if DOWNLOADED.search(one[0]))):
                yield from (one._replace(at=match.start()) for one in address(match[0]))
        if _GIT.search(text):
            for match, repository, ref in refs(text, _repository, (), shell or Shell()):
                if _REF.fullmatch(ref):
                    yield Said("git", repository, ref, match.start() + len(match[0]) - len(match[0].lstrip()))


def _pins(text: str) -> Iterator[Said]:
    for match in PIN.finditer(text) if "==" in text else ():
        if not re.search(r"\s", match[0]) and not text.startswith((".*", "*"), match.end()):
            yield Said("pin", match[1], match[2], match.start())
    for match in AT.finditer(text) if "@" in text and "uv" in text else ():
        if _UV.search(text[max(match.start() - _NEAR, 0) : match.start()].rpartition("\n")[2]):
            yield Said("pin", match[1], match[2], match.start())


def address(url: str) -> Iterator[Said]:
    """The wheel that an address names, and the tag of the repository that it is about."""
    bare = re.split(r"[?#]", re.sub(r"^\w+(?:\+\w+)?://", "", url))[0]
    parts = bare.split("/")
    name, version = file_in(parts) if bare.endswith(".whl") else ("", "")
    if name:
        yield Said("pin", name, version, 0)
    repository = _repository(url)
    ref = repository_and_ref(url, {repository})[1] if len(parts) > 2 and repository else ""
    if not name and "$" not in ref and _REF.fullmatch(ref):
        yield Said("git", repository, ref, 0)


def _repository(url: str) -> str:
    """The repository that an address is about: the second name behind its host."""
    parts = re.sub(r"^\w+(?:\+\w+)?://|^git@[^:]*:", lambda found: "host/" * found[0].startswith("git@"), url).split(
        "/"
    )
    return canonical(re.split(r"[@?#]", parts[2])[0].removesuffix(".git")) if len(parts) > 2 else ""


def command(
    path: str, text: str, line: Callable[[int], int], scope: str, shell: Shell | None = None
) -> Iterator[Place]:
    """What commands pin, as places; `line` turns an offset in the text into a line of the file."""
    yield from (place(path, line(said.at), said, scope) for said in Commands().look(text, shell))


def place(path: str, line: int, said: Said, scope: str) -> Place:
    """What was said as a place; a `scope` is that of a pin alone."""
    stem = variable_stem(said.name) if said.kind == "build-arg" else package_stem(said.name)
    return Place(path, line, said.kind, said.name, said.value, stem, scope if said.kind == "pin" else "")


def script_places(path: str, text: str, first: int = 1) -> Iterator[Place]:
    """What the commands of a whole script pin, which begins on a line of the file."""
    whole, line = script(text, Commands.versions)
    yield from command(path, whole, lambda at: first + line(at) - 1, "script")


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
