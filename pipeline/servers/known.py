"""The servers that are known, by name."""

from __future__ import annotations

from .adapter import Adapter
from .sglang import ADAPTER as SGLANG
from .vllm import ADAPTER as VLLM


def adapter_of(name: str) -> Adapter:
    """The adapter of a server by its name, which `words.parse` checked."""
    return SGLANG if name == SGLANG.name else VLLM
