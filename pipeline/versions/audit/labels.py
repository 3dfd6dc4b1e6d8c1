"""Local labels (`+cu130`): no versions of their own, but they should agree with each other and with CUDA."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from pipeline.versions.sites import local_label

from .places import CUDA_LABEL, Place
from .verdict import Confidence, Disagreement


def judge_labels(places: Iterable[Place], cuda: Collection[Place]) -> list[Disagreement]:
    """Packages whose CUDA labels differ from each other, or from every version of CUDA that the tree names.

    `cuda` are the places of CUDA itself. Labels that all fit some of them are builds for several versions.
    """
    by_name: dict[str, list[Place]] = defaultdict(list)
    for place in sorted(set(places)):
        if CUDA_LABEL.fullmatch(local_label(place.value)):
            by_name[place.stem].append(place)
    versions = [place for place in sorted(cuda) if place.kind not in ("pin", "range") and _cu(place.value)]
    fitting = {_cu(place.value) for place in versions}
    found = []
    for labelled in by_name.values():
        labels = {local_label(place.value) for place in labelled}
        odd = [place for place in labelled if local_label(place.value) not in fitting]
        if versions and odd:
            sure = any(one.variants == two.variants for one in odd for two in versions)
            found.append(_said(sure, "a local label against the version of CUDA", [*labelled, *versions]))
        elif len(labels) > 1:
            first = {local_label(place.value): place for place in reversed(labelled)}
            alike = {place.variants for place in first.values()}
            sure = not versions and len(alike) < len(first)
            found.append(_said(sure, "one package with several local labels", labelled))
    return found


def _cu(version: str) -> str:
    """`cu130` of 13.0.3; nothing of what names no minor version."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return f"cu{found[1]}{found[2]}" if found else ""


def _said(sure: bool, why: str, places: list[Place]) -> Disagreement:
    values: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        values[place.value].append(place)
    ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
    listed = tuple((value, tuple(group)) for value, group in ordered)
    return Disagreement(places[0].name, Confidence.LIKELY if sure else Confidence.POSSIBLE, why, listed)
