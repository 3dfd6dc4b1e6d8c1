"""Whether what is attached fits the image that it is attached to: one line of what is wrong, or empty."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pipeline.contract.errors import CacheRefused
from pipeline.contract.manifest import Manifest as AutotuneManifest
from pipeline.contract.text import shown
from pipeline.contract.verdict import Verdict
from pipeline.image.labels import KEY, PREFIX
from pipeline.registry.errors import InvalidResponse

from .evidence import Answer, foreign
from .images import Image

MANIFEST_LABEL = f"{PREFIX}.manifest"
ANNOTATED = (KEY, f"{PREFIX}.plan", MANIFEST_LABEL)  # labels that annotations repeat


def autotune_answer(key: str, sha: str, found: dict[str, bytes]) -> Answer:
    """Whether the manifest that a label names by its sha256 is among the attached ones, and is of the label's key."""
    body = found.get(sha)
    if body is None:
        return Answer("autotune", "missing", f"manifest {sha[:12]}… of key {shown(key)} is not attached")
    said = AutotuneManifest.from_json(parsed(body))
    if said.key != key:
        return Answer(
            "autotune", "wrong", f"manifest {sha[:12]}… is of key {shown(said.key)}, the label names {shown(key)}"
        )
    return Answer("autotune", "ok", f"{key}, {len(said.covered)} op × bucket pairs")


def verdict_answer(attached: Iterable[tuple[bytes, str]], image: Image) -> Answer:
    """Whether the verdicts that count together replayed every key of the image's label.

    Each comes with why it does not count, empty where nothing is against it. Several hosts may each have replayed the
    keys of their own GPU.
    """
    against: list[str] = []
    counted: list[Verdict] = []
    for body, why in attached:
        found = why or _verdict(body, image)
        counted += [found] if isinstance(found, Verdict) else []
        against += [found] if isinstance(found, str) else []
    replayed = {key for one in counted for key in one.replayed_keys()}
    missing = [key for key in listed(image, KEY) if key not in replayed]
    if replayed and not missing:
        devices = dict.fromkeys(shown(one.device, 80) for one in counted if one.replayed_keys())
        return Answer("verdict", "ok", f"replay pass on {', '.join(devices)}")
    if counted:
        return Answer("verdict", "wrong", f"not replayed: {', '.join(map(shown, missing)) or 'no key at all'}")
    if against:
        return Answer("verdict", "wrong", against[0] + (f" (and {len(against) - 1} more)" if against[1:] else ""))
    return Answer("verdict", "missing", "none is attached")


def _verdict(body: bytes, image: Image) -> Verdict | str:
    """A verdict that passed and is about this image, else why it does not count."""
    try:
        with foreign("a verdict"):
            found = Verdict.from_json(parsed(body))
            texts: tuple[object, ...] = (found.key, found.manifest_sha256, *found.replayed, *found.findings)
            assert all(isinstance(one, str) for one in texts)
    except (InvalidResponse, CacheRefused) as error:
        return f"a verdict cannot be read: {error.message}"
    rules = (
        (
            found.config_digest != image.config_digest,
            f"a verdict is of config {shown(found.config_digest, 80)}, the image's is {image.config_digest}",
        ),
        (
            found.cache_diff_id not in image.diff_ids[-1:],
            f"a verdict is of the cache layer {shown(found.cache_diff_id, 80)}, the image's last is another",
        ),
        (  # in any order, and beside those that came with the base image
            not set(listed(image, MANIFEST_LABEL)) <= set(str(found.manifest_sha256).split(",")),
            "a verdict is of other manifests than the label names",
        ),
        (found.result != "pass", f"a verdict says {found.result}: {shown(next(iter(found.findings), ''))}"),
    )
    return next((why for wrong, why in rules if wrong), found)


def statement_wrong(statement: dict[str, Any], image: Image) -> str:
    """Why an in-toto statement is not about this image."""
    subjects = statement.get("subject")
    digests = {
        str(one["digest"].get("sha256"))
        for one in (subjects if isinstance(subjects, list) else ())
        if isinstance(one, dict) and isinstance(one.get("digest"), dict)
    }
    if image.manifest.digest.removeprefix("sha256:") not in digests:
        return "its subject is another image"
    return ""


def sbom_answer(kind: str, count: int, wrong: str) -> Answer:
    """The answer for an SBOM of so many packages."""
    if wrong or not count:
        return Answer("sbom", "wrong", wrong or f"{kind}: it lists nothing")
    return Answer("sbom", "ok", f"{kind}, {count} packages")


def count(value: object, name: str) -> int:
    """How many items a list below a name has; 0 where there is no list."""
    inner = value.get(name) if isinstance(value, dict) else None
    return len(inner) if isinstance(inner, list) else 0


def listed(image: Image, label: str) -> list[str]:
    """The parts of a label that separates them by commas."""
    return [part for part in image.labels.get(label, "").split(",") if part]


def parsed(body: bytes) -> object:
    """JSON of whatever shape; raise `InvalidResponse`."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse("what is attached is not JSON") from error
