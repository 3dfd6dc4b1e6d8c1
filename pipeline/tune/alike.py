"""Other keys for one answer: callers who ask the same of a kernel with tensors of another shape.

The shape of every input is part of a key, of `bmm_fp8` also that of its two scales, which hold one number either way.
FlashInfer's own quantizer, vLLM and this tuner give scalars (`layer.input_scale.max()`), SGLang 0.5.23 gives tensors of
shape (1,) (srt/layers/quantization/fp8_utils.py, `flashinfer_bmm_fp8`). Without an entry under its key such a caller
would find nothing of what was tuned for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .agreement import Held

_FP8_GEMM, _SCALARS, _VECTORS = "('fp8_gemm', ", ", (), (), ", ", (1,), (1,), "


def other_keys(file_key: str) -> tuple[str, ...]:
    """The keys under which other callers ask what `file_key` answers."""
    if not file_key.startswith(_FP8_GEMM) or file_key.count(_SCALARS) != 1:
        return ()
    return (file_key.replace(_SCALARS, _VECTORS),)


def with_other_keys(entries: Mapping[str, Held], owners: dict[str, tuple[int, ...]]) -> dict[str, Held]:
    """`entries` and, beside each, the same answer under its other keys; `owners` learns who holds those."""
    found = dict(entries)
    for key, held in entries.items():
        for other in other_keys(key):
            found.setdefault(other, held)
            if key in owners:
                owners[other] = owners[key]
    return found


def how_many_more(keys: Iterable[str]) -> int:
    """How many entries `with_other_keys` adds to those of one rank."""
    keys = set(keys)
    return len({other for key in keys for other in other_keys(key)} - keys)


def told(more: int) -> str:
    """The note of a manifest whose file holds such entries; empty where it holds none."""
    if not more:
        return ""
    return f"{more} entries of fp8_gemm stand in the file a second time, for callers whose scales have the shape (1,)"
