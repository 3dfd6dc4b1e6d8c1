"""The step `bake`: the final stage, built over the tuned directory, with labels that name the key."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.cache.tree import find_keys, load_manifest
from pipeline.contract.digest import sha256_file
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import MANIFEST_FILE

from .buildkit import Builder, Built, Stage
from .contexts import stage_tuned

PREFIX = "io.github.tuned-image-pipeline"


def read_manifest(root: Path) -> Manifest:
    """The manifest of the one key below a cache root."""
    return load_manifest(root / str(find_keys(root)[0]) / MANIFEST_FILE)


def labels(root: Path, base: str) -> dict[str, str]:
    """Labels of the finished image: what it is, the key, the plan's and the manifest's digest."""
    manifest = read_manifest(root)
    return {
        "org.opencontainers.image.title": f"{manifest.plan.model}, tuned",
        "org.opencontainers.image.base.name": base,
        f"{PREFIX}.key": manifest.key,
        f"{PREFIX}.plan": manifest.plan.digest,
        f"{PREFIX}.manifest": sha256_file(root / manifest.key / MANIFEST_FILE),
        f"{PREFIX}.flashinfer": manifest.plan.flashinfer_version,
        f"{PREFIX}.arch": manifest.record.arch,
    }


def bake(
    builder: Builder, contexts: Mapping[str, Path], arguments: Mapping[str, str], *, root: Path, base: str, home: Path
) -> Built:
    """Build `final` with the cache root as the named context `tuned`; the same root gives the same layer."""
    (home / "contexts").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home / "contexts", prefix="bake-") as temporary:
        tuned = stage_tuned(root, Path(temporary) / "tuned")
        stage = Stage(
            target="final",
            contexts={**contexts, "tuned": tuned},
            arguments=arguments,
            labels=labels(root, base),
        )
        return builder.build(stage)
