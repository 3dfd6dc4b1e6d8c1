"""Other keys for one answer: callers who ask the same of a kernel with tensors of another shape.

The shape of every input is part of a key, of `bmm_fp8` also that of its two scales, which are one number either way.
FlashInfer's own quantizer, vLLM and our tuner give scalars (`layer.input_scale.max()`), SGLang 0.5.23 gives tensors of
shape (1,) (srt/layers/quantization/fp8_utils.py, `flashinfer_bmm_fp8`). The tuner therefore writes such an answer under
both keys. Whoever counts or compares answers counts it once; a replay asks for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from .read import Entry

Answer = TypeVar("Answer")
Shapes = tuple[tuple[int, ...], ...]

OTHERS = "callers whose scales have the shape (1,)"
_FP8_GEMM, _SCALARS, _VECTORS = "('fp8_gemm', ", ", (), (), ", ", (1,), (1,), "


def other_keys(file_key: str) -> tuple[str, ...]:
    """The keys under which other callers ask what `file_key` answers."""
    if not file_key.startswith(_FP8_GEMM) or file_key.count(_SCALARS) != 1:
        return ()
    return (file_key.replace(_SCALARS, _VECTORS),)


def other_shapes(shapes: Shapes) -> Shapes:
    """The shapes of a call's inputs as the callers of its other key have them; for calls whose key has another."""
    return tuple(shape or (1,) for shape in shapes)


def with_other_keys(entries: Mapping[str, Answer], owners: dict[str, tuple[int, ...]]) -> dict[str, Answer]:
    """`entries` and, beside each, the same answer under its other keys; `owners` learns which ranks have those."""
    found = dict(entries)
    for key, answer in entries.items():
        for other in other_keys(key):
            found.setdefault(other, answer)
            if key in owners:
                owners[other] = owners[key]
    return found


def how_many_more(keys: Iterable[str]) -> int:
    """How many entries `with_other_keys` adds to those of one rank."""
    keys = set(keys)
    return len({other for key in keys for other in other_keys(key)} - keys)


def second_keys(entries: Mapping[str, Entry]) -> frozenset[str]:
    """The keys under which an answer of the file stands a second time, not those that have one of their own."""
    return frozenset(
        other
        for key, entry in entries.items()
        for other in other_keys(key)
        if other in entries and entries[other][:2] == entry[:2]
    )


def second_keys_note(more: int) -> str:
    """A sentence about the answers that stand in a file a second time; empty where there are none."""
    if not more:
        return ""
    stand = "entry of fp8_gemm stands" if more == 1 else "entries of fp8_gemm stand"
    return f"{more} {stand} in the file a second time, for {OTHERS}"
