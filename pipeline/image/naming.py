"""Names of images, in the characters that a tag may have."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.digest import sha256_json
from pipeline.contract.manifest import Manifest


def plain(text: str, most: int = 60) -> str:
    """`text` in the characters that a tag may have, at most `most` of them."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c == ".") else "-" for c in text.lower())
    parts = [".".join(piece for piece in part.split(".") if piece) for part in kept.split("-")]
    return "-".join(part for part in parts if part)[:most].strip(".-") or "x"


def default_name(model: str, tp: int, device: str, flashinfer_version: str, key_hash: str) -> str:
    """`tuned/<model>:tp<N>-<gpu>-fi<version>-<first 8 of the key's hash>`."""
    return f"tuned/{plain(model)}:tp{tp}-{plain(device)}-fi{plain(flashinfer_version)}-{key_hash[:8]}"


def key_of(manifests: Sequence[Manifest]) -> str:
    """The hash of the key; for several keys one over theirs."""
    hashes = [manifest.key.rpartition("/")[2] for manifest in manifests]
    return hashes[0] if len(hashes) == 1 else sha256_json(hashes)


def gpu_of(manifests: Sequence[Manifest]) -> str:
    """What the keys were tuned on: the GPUs' names without the vendor's, or `cpu-<machine>`."""
    found = [m.record.host.gpus[0].removeprefix("NVIDIA ") if m.record.host.gpus else m.record.arch for m in manifests]
    return "-".join(dict.fromkeys(found))
