"""Small images in a registry, as a release leaves them, made without an engine; and ways to leave something out."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cache_samples
from release_registries import command

from pipeline.contract.digest import sha256_bytes, sha256_file
from pipeline.contract.places import CACHE_ROOT, MANIFEST_FILE
from pipeline.contract.verdict import Verdict
from pipeline.image.labels import KEY, PREFIX
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Descriptor, Manifest
from pipeline.registry.reference import Reference
from pipeline.release import media

KEY_PASSWORD = "k3y-word-of-a-test"


@dataclass(frozen=True)
class Sample:
    """An image that was pushed by digest: its reference, what its verdict must say, and its manifest.json."""

    reference: Reference
    verdict: Verdict
    autotune: bytes


def put_json(registry: Registry, repository: str, value: Any, kind: str) -> Descriptor:
    return registry.put_blob(repository, json.dumps(value).encode(), kind)


def put_manifest(registry: Registry, repository: str, value: dict[str, Any]) -> Descriptor:
    body = json.dumps(value).encode()
    digest = f"sha256:{sha256_bytes(body)}"
    registry.put_manifest(repository, Manifest.of(body, value["mediaType"]))
    return Descriptor(value["mediaType"], digest, len(body))


def push(
    registry: Registry,
    repository: str,
    tmp_path: Path,
    *,
    tactic: int = 3,
    annotate: bool = True,
    provenance: Any = "own",
) -> Sample:
    """An index with one image of a base layer and a cache layer, and BuildKit's provenance beside it."""
    root = tmp_path / f"root-{tactic}"
    place = cache_samples.write(root, tactic=tactic)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(root, CACHE_ROOT.lstrip("/"))
    layers, diff_ids = [], []
    for data in (b"\0" * 10240, out.getvalue()):
        layers.append(registry.put_blob(repository, gzip.compress(data, mtime=0), media.LAYER_GZIP).to_json())
        diff_ids.append(f"sha256:{sha256_bytes(data)}")
    made, _ = cache_samples.manifest(tactic=tactic)
    sha = sha256_file(place / MANIFEST_FILE)
    labels = {KEY: made.key, f"{PREFIX}.plan": made.plan.digest, f"{PREFIX}.manifest": sha}
    config = {"architecture": "amd64", "os": "linux", "config": {"Labels": labels},
              "rootfs": {"type": "layers", "diff_ids": diff_ids}}  # fmt: skip
    named = put_json(registry, repository, config, media.CONFIG)
    image = put_manifest(registry, repository, {
        "schemaVersion": 2, "mediaType": media.MANIFEST, "config": named.to_json(), "layers": layers,
        **({"annotations": labels} if annotate else {}),
    })  # fmt: skip
    entries = [image.to_json() | {"platform": {"architecture": "amd64", "os": "linux"}}]
    if provenance is not None:
        entries.append(_attestation(registry, repository, image, provenance))
    index = put_manifest(registry, repository, {"schemaVersion": 2, "mediaType": media.INDEX, "manifests": entries})
    verdict = Verdict(named.digest, diff_ids[-1], sha, made.key, "A CPU", "replay", "pass", {"keys": 1})
    return Sample(
        Reference(registry.name, repository, digest=index.digest), verdict, (place / MANIFEST_FILE).read_bytes()
    )


def _attestation(registry: Registry, repository: str, image: Descriptor, provenance: Any) -> dict[str, Any]:
    kind = "https://slsa.dev/provenance/v1"
    digest = image.digest if provenance == "own" else provenance
    statement = {
        "_type": "https://in-toto.io/Statement/v0.1", "predicateType": kind,
        "subject": [{"name": "_", "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicate": {"buildDefinition": {"buildType": "a build of a test"}},
    }  # fmt: skip
    blob = put_json(registry, repository, statement, "application/vnd.in-toto+json")
    layer = replace(blob, annotations={"in-toto.io/predicate-type": kind})
    config = put_json(registry, repository, {"architecture": "unknown", "os": "unknown"}, media.CONFIG)
    made = put_manifest(registry, repository, {"schemaVersion": 2, "mediaType": media.MANIFEST,
                                               "config": config.to_json(), "layers": [layer.to_json()]})  # fmt: skip
    notes = {"vnd.docker.reference.digest": image.digest, "vnd.docker.reference.type": "attestation-manifest"}
    return replace(made, annotations=notes).to_json() | {"platform": {"architecture": "unknown", "os": "unknown"}}


def key_pair(folder: Path) -> tuple[Path, Path]:
    """A cosign key pair whose private key is encrypted with KEY_PASSWORD."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["cosign", "generate-key-pair"], cwd=folder, env={**os.environ, "COSIGN_PASSWORD": KEY_PASSWORD}, check=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    return folder / "cosign.key", folder / "cosign.pub"


def inspect(name: str) -> dict[str, Any]:
    """The raw manifest, as skopeo reads it."""
    return json.loads(command("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"))
