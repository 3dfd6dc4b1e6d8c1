"""Small images as a build leaves them, made without an engine: what `BuiltImage` is to a release, and its export."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cache_samples
from release_registries import command

from pipeline.contract.digest import image_identity, sha256_bytes, sha256_file
from pipeline.contract.places import CACHE_ROOT, MANIFEST_FILE
from pipeline.contract.verdict import Verdict
from pipeline.image.names import KEY, PREFIX, PRODUCER
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import IMAGE_CONFIG, INDEX, LAYER_GZIP, MANIFEST, Descriptor
from pipeline.registry.reference import Reference
from pipeline.release import images
from pipeline.release.cosign import Signer
from pipeline.release.publish import Published, Publisher
from pipeline.release.tags import GPU, INPUTS

KEY_PASSWORD = "k3y-word-of-a-test"
BASE = bytes(range(256)) * 400
DISTRIBUTION = {"name": "torch", "version": "2.13.0", "licence": "BSD-3-Clause", "licence_name": "", "summary": "x"}


@dataclass
class SampleImage:
    """An image of a base layer and a cache layer. `without` leaves out `annotations` or `provenance`."""

    folder: Path
    tactic: int = 3
    platform: str = "amd64"
    without: tuple[str, ...] = ()
    subject: str = ""  # of its provenance, where that is to be wrong
    server: str = ""  # whose start made its caches
    exports: int = 0
    gpu: str = "cpu-x86_64"
    labels: dict[str, str] = field(init=False)
    config: bytes = field(init=False)
    layers: list[bytes] = field(init=False)
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        root = self.folder / f"root-{self.tactic}-{self.platform}"
        place = root / cache_samples.manifest(tactic=self.tactic)[0].key
        if not root.exists():
            cache_samples.write(root, tactic=self.tactic)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for path in sorted(root.rglob("*")):
                info = archive.gettarinfo(path, f"{CACHE_ROOT.lstrip('/')}/{path.relative_to(root)}")
                info.mtime = 0
                archive.addfile(info, io.BytesIO(path.read_bytes()) if path.is_file() else None)
        tars = [BASE, out.getvalue()]
        self.layers = [gzip.compress(tar, mtime=0) for tar in tars]
        made, _ = cache_samples.manifest(tactic=self.tactic)
        sha = sha256_file(place / MANIFEST_FILE)
        self.manifests = ((place / MANIFEST_FILE).read_bytes(),)
        self.labels = {
            KEY: made.key, f"{PREFIX}.plan": made.plan.digest, f"{PREFIX}.manifest": sha,
            f"{PREFIX}.flashinfer": "0.6.16",
        }  # fmt: skip
        if self.server:
            self.manifests, sha = (json.dumps({"schema": 1, "server": self.server}).encode(),), ""
            self.labels = {PRODUCER: self.server, f"{PREFIX}.warm-up": "e" * 64}
        diff_ids = [f"sha256:{sha256_bytes(tar)}" for tar in tars]
        config = {"architecture": self.platform, "os": "linux", "config": {"Labels": self.labels},
                  "rootfs": {"type": "layers", "diff_ids": diff_ids}}  # fmt: skip
        self.config = json.dumps(config).encode()
        identity = image_identity(diff_ids, {"Labels": self.labels})
        self.verdict = Verdict(
            identity,
            diff_ids[-1],
            sha,
            "torch-compile,triton" if self.server else made.key,
            "A CPU",
            "replay",
            "pass",
            {"keys": 1},
        )
        self.wheels, self.log = self.folder / "wheels", self.folder / "log"

    @property
    def producer(self) -> str:
        return self.server or "tune"

    @property
    def config_digest(self) -> str:
        return f"sha256:{sha256_bytes(self.config)}"

    def annotations(self) -> dict[str, str]:
        return {} if "annotations" in self.without else {**self.labels, GPU: self.gpu}

    def run(self, words: Any) -> str:
        return json.dumps({"distributions": [DISTRIBUTION], "status": "", "release": "ID=debian"})

    def export(self, layout: Path, name: str, annotations: Any, compression: str) -> str:
        """Fill a layout as BuildKit does; two exports differ in the time that their provenance names."""
        self.exports += 1

        def put(data: bytes, kind: str, **more: Any) -> Descriptor:
            path = layout / "blobs" / "sha256" / sha256_bytes(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return replace(Descriptor.of(data, kind), **more)

        def put_json(value: Any, kind: str, **more: Any) -> Descriptor:
            return put(json.dumps(value).encode(), kind, **more)

        whole = {"schemaVersion": 2, "mediaType": MANIFEST, "annotations": dict(annotations)}
        image = put_json(
            {**whole, "config": put(self.config, IMAGE_CONFIG).to_json(),
             "layers": [put(layer, LAYER_GZIP).to_json() for layer in self.layers]},
            MANIFEST, platform={"architecture": self.platform, "os": "linux"},
        )  # fmt: skip
        entries = [image]
        if "provenance" not in self.without:
            kind = "https://slsa.dev/provenance/v1"
            subject = (self.subject or image.digest).removeprefix("sha256:")
            statement = {
                "predicateType": kind, "subject": [{"name": "_", "digest": {"sha256": subject}}],
                "predicate": {"buildDefinition": {"buildType": "a test's"}, "started": time.time_ns()},
            }  # fmt: skip
            note = {"in-toto.io/predicate-type": kind}
            layer = put_json(statement, "application/vnd.in-toto+json", annotations=note)
            value = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer.to_json()],
                     "config": put(b"{}", IMAGE_CONFIG).to_json()}  # fmt: skip
            notes = {images.ATTESTATION_OF: image.digest, images.ATTESTATION_KIND: "attestation-manifest"}
            entries.append(put_json(value, MANIFEST, annotations=notes, platform={"architecture": "unknown"}))
        value = {**whole, "mediaType": INDEX, "manifests": [one.to_json() for one in entries]}
        return put_json(value, INDEX).digest


def release(
    registry: Registry, repository: str, image: SampleImage, *, tag: str = "", signer: Signer | None = None,
    inputs: str = "1" * 64, home: Path | None = None,
) -> Published:  # fmt: skip
    """Publish an image as a release does."""
    layout = image.folder / "layout"
    publisher = Publisher(registry, Reference(registry.name, repository), home or image.folder / "home", layout, signer)
    return publisher.publish(image, (image.verdict,), inputs, {**image.annotations(), INPUTS: inputs}, tag)


def key_pair(folder: Path) -> tuple[Path, Path]:
    """A cosign key pair whose private key is encrypted with KEY_PASSWORD."""
    subprocess.run(
        ["cosign", "generate-key-pair"], cwd=folder, env={**os.environ, "COSIGN_PASSWORD": KEY_PASSWORD}, check=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    return folder / "cosign.key", folder / "cosign.pub"


def inspect(name: str) -> dict[str, Any]:
    """The raw manifest, as skopeo reads it."""
    return json.loads(command("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"))
