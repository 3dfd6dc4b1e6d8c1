"""Whether what is attached fits the image that it is attached to: one line of what is wrong, or empty."""

from __future__ import annotations

import json
from typing import Any

from pipeline.cache.finding import shown
from pipeline.contract.errors import CacheRefused
from pipeline.contract.manifest import Manifest as AutotuneManifest
from pipeline.contract.verdict import Verdict
from pipeline.image.labels import KEY, PREFIX

from .errors import AnswerInvalid
from .evidence import Answer
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


def verdict_wrong(body: bytes, image: Image) -> str:
    """Why an attached verdict does not prove this image; raises nothing."""
    try:
        found = Verdict.from_json(parsed(body))
    except (AnswerInvalid, CacheRefused) as error:
        return f"a verdict cannot be read: {error.message}"
    named = image.labels.get(MANIFEST_LABEL, found.manifest_sha256)
    rules = (
        (
            found.config_digest != image.config_digest,
            f"a verdict is of config {shown(found.config_digest, 80)}, the image's is {image.config_digest}",
        ),
        (
            found.cache_diff_id not in image.diff_ids[-1:],
            f"a verdict is of the cache layer {shown(found.cache_diff_id, 80)}, the image's last is another",
        ),
        (found.manifest_sha256 != named, "a verdict is of other manifests than the label names"),
        (found.result != "pass", f"a verdict says {found.result}: {shown(next(iter(found.findings), ''))}"),
        (found.level != "replay", "a verdict is static only: the cache was not replayed on its device"),
    )
    return next((why for wrong, why in rules if wrong), "")


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
    """JSON of whatever shape; raise `AnswerInvalid`."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AnswerInvalid("what is attached is not JSON") from error
