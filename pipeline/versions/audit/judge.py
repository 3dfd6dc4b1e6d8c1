"""Places to findings: which values of one name differ, how sure it is that they should not, and why."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations, product
from typing import NamedTuple

from pipeline.versions.sites import public

from .labels import judge_labels
from .places import Place, is_family, package_stem
from .verdict import Confidence, Disagreement

# Names that every project has one of its own of: alike in two places means nothing.
_COMMON = frozenset({
    "api", "app", "base", "build", "cache", "chart", "client", "config", "current", "data", "db", "default", "doc",
    "document", "file", "format", "helm", "image", "manifest", "model", "new", "next", "old", "package", "plugin",
    "product", "project", "protocol", "release", "schema", "server", "service", "spec", "state", "supported", "target",
    "tool", "version", "wire",
})  # fmt: skip
# Images that several stages or variants may well base on in several versions.
_BASES = frozenset({
    "alpine", "almalinux", "amazonlinux", "archlinux", "busybox", "centos", "debian", "fedora", "golang", "go", "node",
    "nginx", "openjdk", "postgres", "python", "redis", "rockylinux", "ruby", "rust", "ubi8", "ubi9", "ubuntu",
})  # fmt: skip
_ASSIGNED = frozenset({"ENV", "python", "shell", "yaml"})
_SETTING = frozenset({"ARG", "bake", "build-arg"})
_SHOWN = 3  # variants that a reason names


class _Reason(NamedTuple):
    """Why two values should be one, and the variants that speak against it."""

    why: str
    variants: tuple[str, ...] = ()


_Verdict = tuple[Confidence, _Reason]


def judge(places: Iterable[Place]) -> list[Disagreement]:
    """Every disagreement, strongest first; names that are bounds (`MIN_…`, `>=…`) only bound pins."""
    by_stem: dict[str, set[Place]] = defaultdict(set)
    for place in places:
        bound = re.match(r"(?:min|max|minimum|maximum)-", place.stem) or re.match(r"[<>=~!]", place.value)
        if place.stem and (place.kind == "range" or not bound):
            by_stem[place.stem].add(place)
    found = [one for stem, group in by_stem.items() for one in _group(stem, sorted(group))]
    found += judge_labels((place for group in by_stem.values() for place in group), by_stem)
    return sorted(found, key=lambda one: (-one.confidence, -sum(len(p) for _, p in one.values), one.name, one.why))


def _group(stem: str, places: Sequence[Place]) -> list[Disagreement]:
    """Every disagreement of one name, one for each degree of confidence with all its reasons, strongest first.

    What differs for a weaker reason between places that a stronger one lists beside each other is not said again.
    """
    verdicts: dict[Confidence, dict[_Reason, list[tuple[Place, Place]]]] = defaultdict(lambda: defaultdict(list))
    by_value: dict[str, list[Place]] = defaultdict(list)  # most of a large tree says the same
    for place in _sample(places):
        by_value[place.value].append(place)
    for one, two in chain.from_iterable(product(*groups) for groups in combinations(by_value.values(), 2)):
        verdict = _pair(stem, one, two)
        if verdict is not None:
            verdicts[verdict[0]][verdict[1]].append((one, two))
    found: list[Disagreement] = []
    said: list[set[Place]] = []
    for confidence in sorted(verdicts, reverse=True):
        left = {
            reason: kept
            for reason, pairs in verdicts[confidence].items()
            if (kept := [pair for pair in pairs if not any(together.issuperset(pair) for together in said)])
        }
        if not left:
            continue
        involved = {place for pairs in left.values() for pair in pairs for place in pair}
        values = _listed(places, involved)
        said.append({place for _, group in values for place in group})
        found.append(Disagreement(_title(involved), confidence, _why(left), values))
    return found


def _why(reasons: Mapping[_Reason, Sequence[tuple[Place, Place]]]) -> str:
    """The reasons, that of the most pairs first; the variants of each that is never without them."""
    ordered = sorted(reasons, key=lambda reason: (-len(reasons[reason]), reason))
    said = []
    for why in dict.fromkeys(reason.why for reason in ordered):
        variants = [reason.variants for reason in ordered if reason.why == why]
        apart = sorted({variant for group in variants for variant in group})
        for_others = f", though for different variants ({', '.join(apart[:_SHOWN])})"
        said.append(why + (for_others if all(variants) else ""))
    return "; ".join(said)


def _listed(places: Sequence[Place], involved: set[Place]) -> tuple[tuple[str, tuple[Place, ...]], ...]:
    """The values of some places, with every place of the same kinds that says the same; the most frequent first.

    Spellings of one version, with a local label or without, are one value, shown as most places spell it.
    """
    values: dict[str, list[Place]] = defaultdict(list)
    shown = {_same(place) for place in involved}
    kinds = {place.kind for place in involved}
    for place in places:
        if place in involved or (_same(place) in shown and place.kind in kinds):
            values[_same(place)].append(place)
    spelled = [(_spelling(found), found) for found in values.values()]
    ordered = sorted(spelled, key=lambda item: (-len(item[1]), item[0]))
    return tuple((value, tuple(found)) for value, found in ordered)


def _same(place: Place) -> str:
    return place.value if place.kind == "range" else _normal(place.value)


def _spelling(places: Sequence[Place]) -> str:
    """How most places spell a value; of the spellings that are equally frequent the shortest."""
    times = Counter(place.value for place in places)
    return min(times, key=lambda value: (-times[value], len(value), value))


def _sample(places: Sequence[Place]) -> list[Place]:
    """One place per file, kind, name, value and scope: a thousand equal lines say nothing more."""
    kept = {(p.path, p.kind, p.name, p.value, p.scope): p for p in reversed(places)}
    if len(kept) <= 400:
        return sorted(kept.values())
    return sorted({(p.kind, p.name, p.value, p.folder): p for p in kept.values()}.values())[:400]


def _title(places: Iterable[Place]) -> str:
    names = {place.name for place in places}
    shout = [name for name in names if name.isupper()]
    return min(shout or names, key=lambda name: (len(name), name))


def _normal(value: str) -> str:
    return public(value) or value


def _differ(one: Place, two: Place) -> bool:
    """Whether two values are two versions, and not one spelled more or less precisely."""
    if "range" in (one.kind, two.kind):
        return _excluded(one, two)
    first, second = _normal(one.value.lstrip("v")), _normal(two.value.lstrip("v"))
    if first == second:
        return False
    if one.kind in _SETTING and two.kind in _SETTING and not (first[:1].isdigit() and second[:1].isdigit()):
        return one.value != two.value
    short, long = sorted((one.value.lstrip("v"), two.value.lstrip("v")), key=len)
    return not (long.startswith(f"{short}.") and re.fullmatch(r"[\d.]+", long) is not None)


def _excluded(one: Place, two: Place) -> bool:
    """Whether a pin is outside the range that another place asks for."""
    pin, span = (one, two) if two.kind == "range" else (two, one)
    if pin.kind != "pin" or pin.name != span.name:
        return False
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return not SpecifierSet(span.value).contains(pin.value, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False


def _pair(stem: str, one: Place, two: Place) -> _Verdict | None:
    """How sure it is that two places should say the same, and why; None where they do, or need not."""
    kinds = frozenset((one.kind, two.kind))
    settings = kinds <= _SETTING
    if (stem.startswith("=") and not settings) or not _differ(one, two):
        return None
    same_name = one.name.upper() == two.name.upper()
    if kinds == {"ARG"} and one.path == two.path and same_name:
        return Confidence.CERTAIN, _Reason("one Dockerfile gives the ARG two defaults")
    if stem in _COMMON or stem.startswith("="):
        near_by = settings and same_name and one.folder == two.folder and kinds != {"ARG"}
        return (Confidence.POSSIBLE, _Reason("a setting, not surely a version")) if near_by else None
    verdict = _same_kind(one, two) if len(kinds) == 1 else _two_kinds(one, two, kinds)
    if verdict is None:
        return None
    confidence, why = verdict
    if confidence == Confidence.POSSIBLE or one.variants == two.variants:
        return confidence, _Reason(why)
    return Confidence.POSSIBLE, _Reason(why, tuple(sorted(one.variants ^ two.variants)))


def _same_kind(one: Place, two: Place) -> tuple[Confidence, str] | None:
    """Two ARGs, two pins, two images, … of one thing."""
    close = one.folder == two.folder
    match one.kind:
        case "pin":
            return _pins(one, two)
        case "image" if one.name == two.name:
            sure = close and one.scope == two.scope and one.stem not in _BASES
            return (Confidence.LIKELY if sure else Confidence.POSSIBLE), "one image with two tags"
        case "ARG":
            return (Confidence.LIKELY if close else Confidence.POSSIBLE), "two Dockerfiles give the ARG two defaults"
        case "bake":
            sure = close and one.scope == two.scope
            return (Confidence.LIKELY if sure else Confidence.POSSIBLE), "bake files give two values"
        case "build-arg" | "yaml" | "git" | "ENV" | "shell" if one.path != two.path:  # in one file it is a matrix
            return Confidence.POSSIBLE, "two files give two values"
    return None  # two constants of one name in code are two constants


def _pins(one: Place, two: Place) -> tuple[Confidence, str] | None:
    if one.name != two.name and not (is_family(one.name) and is_family(two.name)):
        return None
    scopes = {one.scope, two.scope}
    what = "one package is pinned twice" if one.name == two.name else "packages that are released together"
    if "script" in scopes:
        return Confidence.POSSIBLE, f"{what}, once in a script"
    if len(scopes) > 1 and "command" not in scopes:
        return Confidence.POSSIBLE, f"{what}, for different environments"
    if one.path == two.path and one.name == two.name:
        return Confidence.CERTAIN, what
    related = one.folder.startswith(two.folder) or two.folder.startswith(one.folder)
    return (Confidence.LIKELY if related or "command" in scopes else Confidence.POSSIBLE), what


def _two_kinds(one: Place, two: Place, kinds: frozenset[str]) -> tuple[Confidence, str] | None:
    """A place of one kind against a place of another."""
    anchors = kinds & {"ARG", "bake", "build-arg", "pin"}
    other = next(iter(kinds - anchors), "")
    verdict: tuple[Confidence, str] | None = None
    if "range" in kinds:
        verdict = Confidence.LIKELY, "a pin is outside the range that another file asks for"
    elif kinds == {"ARG", "bake"}:
        verdict = Confidence.CERTAIN, "a bake file against the ARG that it sets"
    elif kinds <= _SETTING:
        verdict = Confidence.LIKELY, "a build argument against the value that the build files give"
    elif kinds == {"ARG", "ENV"}:
        related = one.folder.startswith(two.folder) or two.folder.startswith(one.folder)
        verdict = (Confidence.LIKELY if related else Confidence.POSSIBLE), "an ENV against the ARG of the same thing"
    elif anchors and other in ("image", "git"):
        verdict = Confidence.POSSIBLE, f"{_SPOKEN[other]} against the version that is named beside it"
    elif anchors and (not other or "pin" in kinds):
        exact = all(place.kind != "pin" or package_stem(place.name) == place.name.lower() for place in (one, two))
        sure = exact or _release(one) == _release(two)
        why = f"{_SPOKEN[other]} against the version that is installed"
        verdict = (Confidence.LIKELY if sure else Confidence.POSSIBLE), why
    elif anchors:
        verdict = Confidence.LIKELY, f"{_SPOKEN[other]} against the version that is built with"
    elif one.name.upper() == two.name.upper() and kinds <= _ASSIGNED:
        first, second = (_SPOKEN[kind] for kind in sorted(kinds))
        verdict = (Confidence.POSSIBLE if one.stem in _BASES else Confidence.LIKELY), f"{first} against {second}"
    return verdict


_SPOKEN = {
    "": "a build file",
    "ENV": "an ENV",
    "git": "a git ref",
    "image": "an image tag",
    "python": "a constant in code",
    "shell": "an assignment in a script",
    "yaml": "a value in YAML",
}


def _release(place: Place) -> list[str]:
    return re.findall(r"\d+", place.value)[:2]
