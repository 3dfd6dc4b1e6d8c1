"""Local labels (`+cu130`, `+rocm6.4`): no versions of their own; they should fit each other, and CUDA or ROCm."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline.versions.sites import local_label

from .places import CUDA_LABEL, Place
from .verdict import Confidence, Disagreement


class _Kind(NamedTuple):
    """Labels of one library: its name, the stem of its versions, how a label looks, whether one fits a version."""

    name: str
    stem: str
    shape: re.Pattern[str]
    fits: Callable[[str, str], bool]


def judge_labels(places: Iterable[Place], versions: Mapping[str, Collection[Place]]) -> list[Disagreement]:
    """Packages whose labels differ from each other, or from every version that the tree names of what they are for.

    `versions` are the places of each stem. Labels that all fit some of them are builds for several versions.
    """
    ordered = sorted(set(places))
    return [one for kind in _KINDS for one in _of_kind(kind, ordered, sorted(versions.get(kind.stem, ())))]


def _of_kind(kind: _Kind, places: Sequence[Place], named: Sequence[Place]) -> list[Disagreement]:
    by_name: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if kind.shape.fullmatch(local_label(place.value)):
            by_name[place.stem].append(place)
    versions = [place for place in named if place.kind not in ("pin", "range") and len(_numbers(place.value)) > 1]
    found = []
    for labelled in by_name.values():
        labels = {local_label(place.value) for place in labelled}
        odd = [p for p in labelled if not any(kind.fits(local_label(p.value), one.value) for one in versions)]
        if versions and odd:
            sure = any(_apart(kind, one) == _apart(kind, two) for one in odd for two in versions)
            found.append(_said(sure, f"a local label against the version of {kind.name}", [*labelled, *versions]))
        elif len(labels) > 1:
            first = {local_label(place.value): place for place in reversed(labelled)}
            alike = {place.variants for place in first.values()}
            sure = not versions and len(alike) < len(first)
            found.append(_said(sure, "one package with several local labels", labelled))
    return found


def _apart(kind: _Kind, place: Place) -> frozenset[str]:
    """The variants of a place but for that which its label makes."""
    return place.variants - {kind.stem}


def _numbers(version: str) -> list[str]:
    """The numbers of a version's release."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return found[1].split(".") if found else []


def _fits_cuda(label: str, version: str) -> bool:
    """`cu130` fits 13.0.3."""
    return label == "cu" + "".join(_numbers(version)[:2])


def _fits_rocm(label: str, version: str) -> bool:
    """`rocm6.4` fits 6.4.1, and so does `rocm6.4.1`; `rocm6.4.2` does not."""
    one, two = _numbers(label.removeprefix("rocm")), _numbers(version)
    return all(first == second for first, second in zip(one, two, strict=False))


_KINDS = (
    _Kind("CUDA", "cuda", CUDA_LABEL, _fits_cuda),
    _Kind("ROCm", "rocm", re.compile(r"rocm\d+(?:\.\d+)*"), _fits_rocm),
)


def _said(sure: bool, why: str, places: list[Place]) -> Disagreement:
    values: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        values[place.value].append(place)
    ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
    listed = tuple((value, tuple(group)) for value, group in ordered)
    return Disagreement(places[0].name, Confidence.LIKELY if sure else Confidence.POSSIBLE, why, listed)
