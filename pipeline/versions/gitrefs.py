"""Which repository a git ref in a command line belongs to: `git clone -b REF`, `git checkout REF`, `git reset REF`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterator

URL = re.compile(r"\b(?:https?|git|ssh|git\+https|git\+ssh|git\+http|ftp)://[^\s\"'<>|;`)\\]+|\bgit@[\w.-]+:[^\s\"']+")
_COMMAND = re.compile(r"[^;|\n&]+(?:&(?!&)[^;|\n&]+)*")
_BRANCH = re.compile(r"(?<!\S)[\"']?(?:--branch(?:=|\s+)|-b\s*)[\"']?([^\s\"';&|)]+)")
_MOVE = re.compile(r"\bgit\s+((?:-[Cc]\s+\S+\s+|--\S+\s+)*)(?:checkout|switch|reset)\s+([^#]*)")
_CD = re.compile(r"(?:\A|(?<=[\s(\"'&;|]))(?:cd|pushd)\s+(?:--\s+)?([^\s;&|)]+)")
_VALUED = re.compile(r"(?<!\S)(?:-b|--branch|--depth|-j|--jobs|-o|--origin|--filter)\s+\S+|(?<!\S)-\S+")
_QUOTES = "\"'()"


def refs(
    text: str, repository: Callable[[str], str], known: Container[str], directory: str = ""
) -> Iterator[tuple[re.Match[str], str, str]]:
    """Match, repository and ref of every command that names a ref.

    `repository` gives the governed repository of an address, or nothing; `known` holds them all; `directory` is
    where the text begins to run. A directory that no clone of this text made is known by its name only.
    """
    here = directory
    cloned: dict[str, str] = {}
    last = ""  # the repository cloned last since the directory changed, else before that where it is not known
    for command in _COMMAND.finditer(text):
        words, span = command[0], command.span()
        urls = [(found.start(), found.end(), repository(found[0])) for found in URL.finditer(text, *span)]
        moves = list(_MOVE.finditer(text, *span))
        for found in _BRANCH.finditer(text, *span) if not moves else ():
            owner = _cloned(urls, found.start(), last if "$" in words else "")
            if owner:
                yield found, owner, found[1]
        moved = _CD.search(text, *span)
        if moved:
            to = moved[1].strip(_QUOTES)
            here = posixpath.normpath(posixpath.join(here, to)) if "$" not in to and to != "-" else ""
            last = last if not here else ""
        if urls and re.search(r"\bclone\b", words):
            start, end, last = urls[-1]
            rest = _VALUED.sub(" ", text[end : span[1]].lstrip(_QUOTES)).split()
            made = rest[0].strip(_QUOTES) if rest else re.split(r"[/:]", text[start:end].rstrip("/"))[-1]
            cloned[_base(posixpath.normpath(posixpath.join(here, made.removesuffix(".git"))))] = last
        for found in moves:
            inside = re.search(r"-C\s+(\S+)", found[1])
            place = posixpath.join(here, inside[1].strip(_QUOTES)) if inside else here
            owner = _owner(place, cloned, known, last)
            if owner:
                yield from ((found, owner, ref) for ref in _wanted(found[2]))


def _cloned(urls: list[tuple[int, int, str]], at: int, last: str) -> str:
    """The repository of a `--branch`: of the address after it, else of the one before it in the same command."""
    after = [owner for start, _, owner in urls if start > at]
    before = [owner for start, _, owner in urls if start < at]
    return [*after, *before[-1:], last][0]


def _owner(place: str, cloned: dict[str, str], known: Container[str], last: str) -> str:
    """The repository whose checkout a directory is; the one cloned last where the directory says nothing."""
    name = _base(place)
    if name in cloned:
        return cloned[name]
    if name in known:
        return name
    return last


def _base(path: str) -> str:
    return re.sub(r"[-_.]+", "-", posixpath.basename(path.rstrip("/"))).lower()


def _wanted(rest: str) -> list[str]:
    """The ref among the words of a checkout: the last word where a branch is made of it, else the first."""
    words = [word.strip(_QUOTES) for word in rest.partition(" -- ")[0].split()]
    plain = [word for word in words if not word.startswith("-")]
    makes = any(word in ("-b", "-B", "-c", "-C", "--orphan") for word in words)
    chosen = plain[1:2] if makes else plain[:1]
    return [word.removeprefix("tags/") for word in chosen]
