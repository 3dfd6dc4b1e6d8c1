"""Content ids: the sha256 of one canonical spelling of JSON, or of bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


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
