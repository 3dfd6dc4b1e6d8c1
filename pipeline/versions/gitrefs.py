"""Which repository a git ref in a command line belongs to: `git clone -b REF`, `git checkout REF`, `git fetch … REF`.

This reads no shell language: commands are told apart at `;`, `&&`, `|` and line ends, directories are followed through
`cd`, and what a variable holds is not known. Time grows with the size of the text, whatever stands in it.
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

URL = re.compile(r"\b(?:https?|git|ssh|git\+https|git\+ssh|git\+http|ftp)://[^\s\"'<>|;`)\\]+|\bgit@[\w.-]+:[^\s\"']+")
HELD = re.compile(r"(?<![\w/])\$(?:\w+|\{\w[^\s{}]{0,200}\})/[^\s\"'<>|;`)\\$]+")  # `$X/owner/name`
# Texts, compiled at their first use: most files name no git.
_COMMAND = r"[^;|\n&]+(?:&(?!&)[^;|\n&]+)*"
_BRANCH = r"(?<!\S)[\"']?(?:--(?:branch|revision)(?:=|\s+)|-b\s*)[\"']?([^\s\"';&|)]+)"
# At most eight options between `git` and its command, so that a row of them is not looked at from each of its members.
_GIT = r"\bgit\s+((?:-[Cc]\s+\S+\s+|--\S+\s+){0,8})(checkout|switch|reset|fetch|pull|remote)\s+([^#]*)"
_IN = r"-C\s+(\S+)|--work-tree=(\S+)"
_CD = r"(?:\A|(?<=[\s(\"'&;|]))(?:(?:cd|pushd)\s+(?:--\s+)?([^\s;&|)]+)|popd\b)"
_VALUED = r"(?<!\S)(?:-b|--branch|--revision|--depth|-j|--jobs|-o|--origin|--filter)\s+\S+|(?<!\S)-\S+"
_QUOTES = "\"'()"
_DEEP = 12  # folders below a repository's root that are looked through
_LONGEST = 1024  # characters of a path that is followed
_MOST = 1000  # checkouts of one stage that are remembered
_OF_OTHERS = frozenset({"3rdparty", "third-party", "external", "extern", "deps", "submodules", "vendor", "modules"})


@dataclass
class Shell:
    """Where commands begin to run (empty: not known), and the checkouts that earlier ones made.

    `cloned` gives the repository of a folder, empty for one that is not governed; `by_name` the folder cloned last
    of each name.
    """

    directory: str = ""
    cloned: dict[str, str] = field(default_factory=dict)
    by_name: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Shell:
        """What a stage built from this one begins with."""
        return Shell(self.directory, dict(self.cloned), dict(self.by_name))

    def enter(self, path: str) -> None:
        """A WORKDIR."""
        self.directory = "" if "$" in path else _joined(self.directory, path)

    def add(self, path: str, repository: str) -> None:
        """A checkout that was made."""
        if len(self.cloned) >= _MOST:
            return
        self.cloned[path] = repository
        self.by_name[_name(path)] = path

    def owner(self, place: str, known: Container[str]) -> str | None:
        """The repository in whose checkout a folder lies, by the folder itself or one above it; None: nothing says.

        A folder that nobody cloned here is known by its name. What lies below `3rdparty` is another repository.
        """
        path = place
        for _ in range(_DEEP):
            if path in self.cloned:
                return self.cloned[path]
            name = _name(path)
            other = self.by_name.get(name, "")
            if other and _may_be_one(path, other):
                return self.cloned[other]
            if name in known:
                return name
            path = posixpath.dirname(path)
            if name in _OF_OTHERS:
                return ""
            if path in ("", "/"):
                break
        return None


def _may_be_one(one: str, two: str) -> bool:
    """Whether two folders of one name may be the same: at least one of them begins where nobody knows."""
    relative = [path for path in (one, two) if not path.startswith("/")]
    return len(relative) == 2 or (len(relative) == 1 and f"{one}/{two}".endswith(f"/{relative[0]}"))


def refs(
    text: str, repository: Callable[[str], str], known: Container[str], shell: Shell
) -> Iterator[tuple[re.Match[str], str, str]]:
    """Match, repository and ref of every command that names a ref; what it clones is added to `shell`.

    `repository` gives the governed repository of an address, or nothing; `known` holds them all.
    """
    git, branch, cd = re.compile(_GIT), re.compile(_BRANCH), re.compile(_CD)
    walk = _Walk(shell.directory)
    last = ""  # the repository cloned last since the directory changed, else before that where it is not known
    for command in re.finditer(_COMMAND, text):
        words, span = command[0], command.span()
        urls = [(found.start(), found.end(), repository(found[0])) for found in URL.finditer(text, *span)]
        if not urls and "$" in words and re.search(r"\bclone\b", words):
            urls = [(found.start(), found.end(), repository(found[0])) for found in HELD.finditer(text, *span)][:1]
        acts = list(git.finditer(text, *span))
        for found in branch.finditer(text, *span) if not acts else ():
            owner = _cloned(urls, found.start(), last if "$" in words else "")
            if owner:
                yield found, owner, found[1]
        moved = cd.search(text, *span)
        if moved:
            walk.follow(moved)
            last = last if not walk.here else ""
        if urls and re.search(r"\bclone\b", words):
            start, end, last = urls[-1]
            rest = re.sub(_VALUED, " ", text[end : span[1]].lstrip(_QUOTES)).split()
            made = rest[0].strip(_QUOTES) if rest else re.split(r"[/:]", text[start:end].rstrip("/"))[-1]
            shell.add(_joined(walk.here, made.removesuffix(".git")), last)
        for found in acts:
            inside = re.search(_IN, found[1])
            place = _joined(walk.here, (inside[1] or inside[2]).strip(_QUOTES)) if inside else walk.here
            if found[2] == "remote":
                if urls:
                    last = urls[-1][2]
                    shell.add(place, last)
                continue
            named = [owner for start, _, owner in urls if start > found.start(2)][:1]  # `git fetch URL REF`
            owner = named[0] if named else _owned(shell, place, known, last)
            if owner:
                yield from ((found, owner, ref) for ref in _wanted(found[2], found[3]))
        walk.leave(words.count(")"))


class _Walk:
    """The directory while commands run, with those to which `)`, `popd` and `cd -` lead back; empty: not known."""

    def __init__(self, here: str) -> None:
        self.here = self.before = here
        self.outside: list[str] = []

    def follow(self, moved: re.Match[str]) -> None:
        """One `cd`, `pushd` or `popd`."""
        to = (moved[1] or "").strip(_QUOTES)
        if not to:
            self.leave(1)
            return
        if moved.string[moved.start() - 1 : moved.start()] == "(" or moved[0].startswith("pushd"):
            self.outside.append(self.here)
        known = self.before if to == "-" else "" if "$" in to else _joined(self.here, to)
        self.here, self.before = known, self.here

    def leave(self, times: int) -> None:
        """So many subshells end."""
        for _ in range(min(times, len(self.outside))):
            self.here = self.outside.pop()


def _owned(shell: Shell, place: str, known: Container[str], last: str) -> str:
    owner = shell.owner(place, known) if place else None
    return last if owner is None else owner


def _cloned(urls: list[tuple[int, int, str]], at: int, last: str) -> str:
    """The repository of a `--branch`: of the address after it, else of the one before it in the same command."""
    after = bisect_right(urls, at, key=lambda url: url[0])
    if after < len(urls):
        return urls[after][2]
    return urls[after - 1][2] if urls else last


def _joined(here: str, to: str) -> str:
    """A folder as seen from another; empty, so not known, where it is longer than any path."""
    whole = posixpath.join(here, to)
    return posixpath.normpath(whole) if len(whole) <= _LONGEST else ""


def _name(path: str) -> str:
    return re.sub(r"[-_.]+", "-", posixpath.basename(path)).lower()


def _wanted(verb: str, rest: str) -> list[str]:
    """The refs among the words of a command.

    Of a checkout the first word that names no branch to make; of a fetch all behind the remote.
    """
    words = [word.strip(_QUOTES) for word in rest.partition(" -- ")[0].split()]
    if verb in ("fetch", "pull"):
        plain = [word for word in re.sub(_VALUED, " ", " ".join(words)).split() if word != "tag"]
        return [word.lstrip("+").partition(":")[0].removeprefix("refs/").removeprefix("tags/") for word in plain[1:]]
    made = {at + 1 for at, word in enumerate(words) if word in ("-b", "-B", "-c", "-C", "--orphan")}
    chosen = [word for at, word in enumerate(words) if at not in made and not word.startswith("-")][:1]
    return [word.removeprefix("tags/") for word in chosen]
