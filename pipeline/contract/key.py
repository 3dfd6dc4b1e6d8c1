"""The key of a cache: `<flashinfer-version>/<arch>/<hash>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .digest import sha256_json
from .errors import CacheRefused
from .record import Record


class KeyInvalid(CacheRefused):
    """A path is not a key."""


@dataclass(frozen=True, order=True)
class Key:
    """Three path parts below the cache root; `hash` is 64 hexadecimal digits."""

    flashinfer_version: str
    arch: str
    hash: str

    def __str__(self) -> str:
        return f"{self.flashinfer_version}/{self.arch}/{self.hash}"

    @staticmethod
    def parse(text: str) -> Key:
        """Read a key from its path; raise `KeyInvalid` for anything else (`..`, absolute, wrong depth)."""
        parts = text.split("/")
        plain = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+!-]*")
        if len(parts) != 3 or not all(plain.fullmatch(p) for p in parts) or not re.fullmatch(r"[0-9a-f]{64}", parts[2]):
            raise KeyInvalid(f"{text!r} is not <flashinfer-version>/<arch>/<64 hexadecimal digits>")
        return Key(*parts)


def make_key(plan_digest: str, record: Record) -> Key:
    """Compute the key of a cache tuned for a plan in an environment; raise `RecordInvalid` on an empty arch."""
    inputs = {"plan": plan_digest, **record.key_inputs()}
    return Key(record.flashinfer["flashinfer_version"], record.arch, sha256_json(inputs))
