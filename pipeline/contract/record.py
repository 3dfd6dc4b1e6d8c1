"""The record: the environment that a cache was tuned in, in two halves.

`flashinfer` is FlashInfer's own flat `_metadata` as its AutoTuner collects it (version, CUDA, cuBLAS, cuDNN,
cuDNN frontend, gpu, and what newer versions add). All of it but `gpu` is the image half. The host half is what
a start-up check can read without importing torch: GPU names, count and driver.

The key of a cache is made of a plan and a record: `<flashinfer-version>/<arch>/<hash>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .decode import decode
from .digest import sha256_json
from .errors import CacheRefused


class RecordInvalid(CacheRefused):
    """A record lacks what a key needs."""


@dataclass(frozen=True)
class Host:
    """The host half: one GPU name per rank in rank order, the driver, and for `cpu-*` the processor.

    `cpu` has `model`, `flags` (sha256 of the sorted flag list) and `threads` (per rank, as text); empty on GPUs.
    """

    gpus: tuple[str, ...] = ()
    driver: str = ""
    cpu: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """FlashInfer's metadata, the arch as FlashInfer names it, and the host half."""

    flashinfer: Mapping[str, str]
    arch: str
    host: Host = field(default_factory=Host)
    packages: Mapping[str, str] = field(default_factory=dict)  # torch, python …: provenance, not in the key
    libraries: Mapping[str, str] = field(default_factory=dict)  # file name to path: provenance as well

    def image_half(self) -> dict[str, str]:
        """What must be equal between the stage that tuned and the finished image."""
        return {name: value for name, value in self.flashinfer.items() if name != "gpu"}

    def key_inputs(self) -> dict[str, Any]:
        """What the key's hash covers beside the plan digest.

        The driver and the GPU count stay out: FlashInfer does not compare them, and a driver upgrade must not
        make a good cache unreachable. For `cpu-*` FlashInfer's fields are all `unknown`, so the processor enters.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.arch):
            raise RecordInvalid(
                f"architecture {self.arch!r} cannot name a cache directory",
                hint="FlashInfer saw no GPU; set FLASHINFER_CUDA_ARCH_LIST or run where the GPUs are visible",
            )
        return {"flashinfer": dict(self.flashinfer), "arch": self.arch, "cpu": dict(self.host.cpu)}

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(value: object) -> Record:
        """Read a record; raise `RecordInvalid` naming each field that is wrong."""
        return decode(Record, value, "the environment record", RecordInvalid)

    def problems(self) -> Iterator[str]:
        """What is wrong though each field has the right type, for `decode`."""
        if not self.flashinfer.get("flashinfer_version"):
            yield ".flashinfer.flashinfer_version is missing"


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
