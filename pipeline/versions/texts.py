"""Versions inside other text: image tags, git refs, addresses, pins of an install command, assignments, labels."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from .gitrefs import HELD, URL, Shell, refs
from .relations import PLACE, Relation, canonical
from .sites import local_label, same_version
from .source import FILE, Versions

_VERSION = r"\d+(?:\.\d+)*(?:(?:[._-]?(?:post|rc|alpha|beta|dev|a|b)\.?\d*)*)"
_FILE = re.compile(
    rf"([A-Za-z0-9][A-Za-z0-9._]*?)-({_VERSION}(?:(?:\+|%2[Bb])[A-Za-z0-9.]+)?)(?:-[^/]*\.whl|\.(?:tar\.\w+|tgz|zip))$"
)
PIN = re.compile(
    rf"(?<![\w./-])([A-Za-z][A-Za-z0-9._-]*)(?:\[[^\]\n]{{0,200}}\])?\s*={{2,3}}"
    rf"(?:\s*|\\?[\"'])({_VERSION}(?:\+[A-Za-z0-9.]+)?)"
)
AT = re.compile(  # torch@2.10.0, as uv takes it
    rf"(?<![\w./@:-])([A-Za-z][A-Za-z0-9._-]*)(?:\[[^\]\n]{{0,200}}\])?@({_VERSION}(?:\+[A-Za-z0-9.]+)?)(?![\w@/:]|\.\d)"
)
_REF_AFTER = (
    "archive",
    "tree",
    "blob",
    "raw",
    "tarball",
    "zipball",
    "download",
    "tags",
    "commit",
    "tag",
    "zip",
    "tar.gz",
)
_ASSIGNED = re.compile(  # all but the name is only looked at, so that `run: X_VERSION=1` is seen twice
    r"(?:(?<![\w$\{./-])|(?<=[\s\"']-D))([A-Za-z_]\w*+)(?=\\?[\"']?[ \t]*"
    r"(?::[ \t]*&?[A-Za-z_][\w.\[\]]{0,60}[ \t]*=|[:?]{0,2}=|:(?=[ \t\"']))[ \t]*(?![=~])"
    r"\\?[\"']?([^\s\"'$`;&|,)}\]<>\\]{1,200}))"
)
_SHOWN = 300  # characters; no file of a package has a longer name
_NUMBER = re.compile(r"v?\d")
_FALLBACK = re.compile(r"\$\{([A-Za-z_]\w*):?[-=]([^${}]+)\}")
_ELSE = re.compile(r"(?<![\w$./-])([A-Za-z_]\w*+)[:?]?=[\"']?\$\{\w+:?[-=]([^\s${}]+)\}")  # X_VERSION=${1:-1.2}
_HOST_HELD = re.compile(r"^(?:\w+://)?\$(?:\w+|\{\w[^\s{}]*\})(?=/)")
DOWNLOADED = re.compile(r"/(?:archive|releases|raw|tarball|zipball)/|\.(?:whl|tar\.\w+|tgz|zip)$")
ENVIRON = re.compile(  # os.environ.get("X", "1.2"), os.getenv(…), setdefault(…), and `… or "1.2"`
    r"\b(?:getenv|environ(?:\.get|\.setdefault))\(\s*[\"']([A-Za-z_]\w*)[\"']\s*"
    r"(?:,\s*(?:default\s*=\s*)?|\)\s*or\s+)[\"']([^\s\"'\\]{1,200})[\"']"
)
_BACKEND = re.compile(r"torch[-_]backend[=\s]+[\"']?([a-z]+\d+)\b", re.IGNORECASE)
_HOST = r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?::\d+)?|localhost(?::\d+)?|[A-Za-z0-9-]+:\d+)/"


class Found(NamedTuple):
    """A version inside a text: which name governs it, what kind of place, what stands there, what is wrong with it.

    `at` is the offset in the text.
    """

    name: str
    kind: str
    text: str
    wrong: str = ""
    at: int = 0


class Texts:
    """Looks into texts for everything that the names of a versions.json govern."""

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self.governors = versions.governors()
        self.repositories: dict[str, str] = {}
        images: list[tuple[str, str]] = []
        for name in versions:
            relation = versions.relation(name)
            for repository in _repositories(relation):
                self.repositories.setdefault(repository, name)
            images += [(image, name) for image in relation.images]
        self.images = sorted(images, reverse=True)
        self.labels = {name: labels_of(versions, name) for name in versions if versions.relation(name).local_label}

    def look(self, text: str, shell: Shell | None = None) -> Iterator[Found]:
        """Every governed version in one command or text; `$…` is left to the checks of the ARGs behind it.

        `shell` is where its commands run and what was cloned before, as far as known; what they clone is added.
        """
        for match, found in self._matches(text, shell or Shell()):
            for one in found:
                yield one._replace(at=match.start() + len(match[0]) - len(match[0].lstrip()))

    def _matches(self, text: str, shell: Shell) -> Iterator[tuple[re.Match[str], Iterator[Found]]]:
        # Each condition is what its pattern cannot do without, and a tenth of its time.
        for image, name in self.images:
            for match in _image_pattern(image).finditer(text) if f"{image}:" in text else ():
                yield match, self.image(name, match["image"], match["tag"])
        patterns = (_ASSIGNED, _FALLBACK, _ELSE, ENVIRON) if any(name in text for name in self.versions) else ()
        for match in chain.from_iterable(pattern.finditer(text) for pattern in patterns):
            if match[1] in self.versions and _alike(match[2], self.versions[match[1]]):
                yield match, self.assignment(match[1], match[2])
        for match in PIN.finditer(text) if "==" in text else ():
            yield match, self.pin(match[1], f"{match[1]}=={match[2]}", match[2])
        for match in AT.finditer(text) if "@" in text else ():
            yield match, self.pin(match[1], match[0], match[2])
        for match in _BACKEND.finditer(text):
            yield match, self.label(match[1], match[0])
        for match in URL.finditer(text) if "://" in text or "git@" in text else ():
            yield match, self.address(match[0])
        for match in HELD.finditer(text) if "$" in text else ():
            if DOWNLOADED.search(match[0]):
                yield match, self.address(match[0])
        if "git" in text or "branch" in text:
            for match, repository, ref in refs(text, self.repository, self.repositories, shell):
                yield match, self.ref(repository, self.repositories[repository], ref)

    def assignment(self, name: str, value: str) -> Iterator[Found]:
        """A managed name that is given a value."""
        wanted = self.versions[name]
        right = same_version(value, wanted)
        yield Found(name, "value", f"{name}={value}", "" if right else f"{name}={value}, {FILE} says {wanted}")

    def pin(self, package: str, text: str, version: str) -> Iterator[Found]:
        """A distribution with its version; the local label must fit the names that labels are made of."""
        name = self.governors.get(canonical(package))
        if name is None:
            return
        wanted = self.versions[name]
        right = same_version(version, wanted)
        yield Found(name, "pin", text, "" if right else f"{text}, {FILE} says {wanted} ({name})")
        for label in local_label(version).split("."):
            yield from self.label(label, text)

    def image(self, name: str, image: str, tag: str) -> Iterator[Found]:
        """An image with its tag, which begins with the version where it has one at all."""
        text = f"{image}:{tag}"
        found = re.match(rf"v?({_VERSION})(?![0-9A-Za-z])", tag)
        if found:
            wanted = self.versions[name]
            right = same_version(found[1], wanted)
            yield Found(name, "image", text, "" if right else f"image {text}, {FILE} says {wanted} ({name})")
        for part in tag.split("-"):
            yield from self.label(part, text)

    def label(self, label: str, text: str) -> Iterator[Found]:
        """A label such as `cu130` where it is of the shape of one that a name gives."""
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"  # an address may hold thousands of labels
        for name, labels in self.labels.items():
            if labels.shape.fullmatch(label):
                right = any(spelled == label or spelled.startswith(label) for spelled in labels.spelled)
                said = f"{self.versions[name]} ({name}), so {' or '.join(labels.spelled)}"
                yield Found(name, "label", text, "" if right else f"{text}: {label}, {FILE} says {said}")

    def address(self, url: str) -> Iterator[Found]:
        """An address: the file that it names, the ref of a repository, labels and versions among its parts."""
        url = _HOST_HELD.sub("https://host", url)
        if "$" in url:
            url = url[: url.index("$")]
        whole, _, fragment = (url.partition("://")[2] or url).partition("#")
        bare, _, query = whole.partition("?")
        parts = [part for part in bare.split("/")[1:] if part]
        name, version = file_in(parts)
        if name:
            yield from self.pin(name, parts[-1], version)
        for part in parts:
            yield from self.label(part, url)
        repository, ref = repository_and_ref(url, self.repositories)
        asked = next((found[1] for found in re.finditer(r"(?:^|&)(?:tag|ref|branch)=([^&]+)", query)), "")
        if repository:
            yield from self.ref(repository, self.repositories[repository], ref or asked or fragment.partition(":")[0])

    def repository(self, url: str) -> str:
        """The governed repository that an address names, or nothing."""
        return repository_and_ref(url, self.repositories)[0]

    def ref(self, repository: str, name: str, ref: str) -> Iterator[Found]:
        """A git ref of a governed repository, where it looks like a version and not like a branch or a commit."""
        wanted = self.versions[name]
        given = self.versions.relation(name).git_ref
        spelled = given.replace("{}", wanted) if given else wanted
        ref = ref.removeprefix("refs/").removeprefix("tags/")
        plain = re.fullmatch(rf"(?:[A-Za-z]+[-_/]?)?({_VERSION}(?:\+[A-Za-z0-9.]+)?)", ref)
        if plain is None or "." not in plain[1]:
            return
        right = ref == spelled or (not given and same_version(plain[1], wanted))
        text = f"{repository} at {ref}"
        yield Found(name, "git", text, "" if right else f"{text}, {FILE} says {spelled} ({name})")


def file_in(parts: Sequence[str]) -> tuple[str, str]:
    """Name and version of the wheel or archive that an address ends with; empty where it is none."""
    named = _FILE.match(parts[-1]) if parts and len(parts[-1]) <= _SHOWN else None
    return (named[1], re.sub("%2[Bb]", "+", named[2])) if named else ("", "")


def repository_and_ref(url: str, known: Container[str]) -> tuple[str, str]:
    """The known repository that an address names, and the ref or version in it; empty where there is none."""
    path = re.split(r"://|^git@[^:]+:", url)[-1].partition("?")[0].partition("#")[0]
    parts = path.split("/")
    for at, part in enumerate(parts):
        stem, _, ref = part.partition("@")
        stem = canonical(stem.removesuffix(".git"))
        if stem not in known or (at == 0 and len(parts) > 1 and "git@" not in url):
            continue
        after = parts[at + 1 : at + 9]
        if after and after[0] == stem:  # an owner of the same name
            continue
        if not ref and after and (after[0] in _REF_AFTER or after[0] in ("releases", "refs", "-")):
            rest = [word for word in after if word not in (*_REF_AFTER, "releases", "refs", "heads", "-")]
            ref = re.sub(r"\.(tar\.\w+|tgz|zip|patch|diff)$", "", rest[0]) if rest else ""
        elif not ref and after and re.fullmatch(rf"v?{_VERSION}", after[0]):
            ref = after[0]
        return stem, ref
    return "", ""


def _alike(value: str, wanted: str) -> bool:
    """Whether a value can be meant as a version: it begins with a number, unless the managed one does not either."""
    return bool(_NUMBER.match(value)) or not _NUMBER.match(wanted)


class Labels(NamedTuple):
    """The spellings that a version gives, and the shape that marks a word as one of them."""

    spelled: tuple[str, ...]
    shape: re.Pattern[str]


def labels_of(versions: Versions, name: str) -> Labels:
    """How labels made of a version read: CUDA 13.0.3 gives `cu130` of `cu{major}{minor}`."""
    numbers = [*re.findall(r"\d+", versions[name]), "0", "0", "0"]
    parts = dict(zip(("major", "minor", "micro"), numbers, strict=False))
    formats = versions.relation(name).local_label
    spelled = tuple(PLACE.sub(lambda found: parts[found[1]], one) for one in formats)
    shapes = {re.sub(r"(\\\{(?:major|minor|micro)\\\})+", r"\\d+", re.escape(one)) for one in formats}
    return Labels(spelled, re.compile("|".join(sorted(shapes))))


def _repositories(relation: Relation) -> tuple[str, ...]:
    if relation.repositories is not None:
        return tuple(canonical(one) for one in relation.repositories)
    return relation.governs()


@lru_cache(maxsize=256)
def _image_pattern(image: str) -> re.Pattern[str]:
    """An image under its own name, at a registry, or in a mirror's folder; `$X/` stands for either of the two."""
    folders = r"(?:[\w.-]+/){0,8}"
    if "/" in image:
        before = rf"{_HOST}{folders}|\$\w+/|\$\{{\w+(?::?-[^}}\s]{{0,200}})?\}}/|\A/"
    else:
        before = rf"(?:docker\.io/)?(?:library/)?|{_HOST}(?:{folders}library/)?"
    return re.compile(
        rf"(?<![\w./:@-])(?:(?:docker-image|docker)://)?(?P<image>(?:{before})?{re.escape(image)}):(?P<tag>[A-Za-z0-9_][\w.-]*)(?![\w{{}}$.-])"
    )
