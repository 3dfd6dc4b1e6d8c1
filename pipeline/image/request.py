"""What the user asked for, once, frozen: every later step reads it and none changes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.plan import Plan


@dataclass(frozen=True)
class Request:
    """One `pipeline image`. `root` is the checkout; `timeout` and `max_wait` are seconds; empty strings mean unset."""

    root: Path
    plan: Plan
    base_image: str = ""
    image: str = ""
    retune: bool = False
    previous: Path | None = None
    timeout: int = 300
    max_wait: float = 1200.0
    store: str = "classic"


def default_name(model: str, tp: int, device: str, flashinfer_version: str, key_hash: str) -> str:
    """`tuned/<model>:tp<N>-<gpu>-fi<version>-<first 8 of the key's hash>`, in the characters that a tag may have."""
    return f"tuned/{_plain(model)}:tp{tp}-{_plain(device)}-fi{_plain(flashinfer_version)}-{key_hash[:8]}"


def _plain(text: str) -> str:
    kept = "".join(c if c.isalnum() or c in ".-" else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part).strip(".-") or "x"
