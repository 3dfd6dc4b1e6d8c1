"""Content ids: the sha256 of one canonical spelling of JSON, of bytes, and of what an image is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CONFIG = ("Env", "Entrypoint", "Cmd", "User", "Labels")


def canonical_json(value: object) -> bytes:
    """Return the one spelling of `value` that ids are computed from: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: object) -> str:
    """Return the sha256 of `canonical_json(value)`."""
    return sha256_bytes(canonical_json(value))


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, read in blocks so that memory stays bounded."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def image_identity(diff_ids: Sequence[str], config: Mapping[str, Any]) -> str:
    """What an image is: `sha256:…` over its diff ids (lowest layer first) and Env, Entrypoint, Cmd, User, Labels.

    Every store and registry gives these alike. Layers alone do not change with ENV, and the inspect of the containerd
    store has no config digest.
    """
    kept = {name: config.get(name) or None for name in _CONFIG}
    return f"sha256:{sha256_json({'layers': list(diff_ids), **kept})}"
