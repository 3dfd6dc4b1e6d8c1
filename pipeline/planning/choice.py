"""What the choice of an op depends on, and what every choice may answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.contract.plan import OpPlan

from .facts import Facts
from .split import pad
from .target import Target

# What has been measured on a GPU for this project; everything else is planned from FlashInfer's code alone.
PROVEN = {"mm_bf16": (90,), "bmm_fp8": (90,)}


@dataclass(frozen=True)
class Context:
    """What the choice of an op depends on beside the part itself."""

    facts: Facts
    target: Target
    version: str
    buckets: tuple[int, ...]
    backends: Mapping[str, Sequence[str]]
    asked: Collection[str] = ()  # what --ops names

    @property
    def out_dtype(self) -> str:
        """The dtype that products write: the model's own, where it is one of 16 bits."""
        return self.facts.dtype if self.facts.dtype in ("bfloat16", "float16") else "bfloat16"

    @property
    def cast(self) -> str:
        """What servers make of a float32 checkpoint (vLLM's config/model.py, SGLang's configs/model_config.py)."""
        if self.facts.dtype != "float32":
            return ""
        return "; servers cast float32, vLLM to bfloat16 and SGLang to float16: put that into config.json to plan it"


class NotTuned(Exception):
    """A part has no op here; the text is the reason that the plan states."""


def unproven(op: str, context: Context) -> tuple[str, ...]:
    """The note of an op that no GPU of this kind has run for this project."""
    if context.target.sm in PROVEN.get(op, ()):
        return ()
    return (f"unverified: planned from FlashInfer's code, {op} has not been run on such a GPU for this project",)


def changed(op: OpPlan, **changes: object) -> OpPlan:
    """`op` with other values of some fields."""
    return replace(op, **changes)  # type: ignore[arg-type]


def padded(op: OpPlan, who: str, multiples: Mapping[str, int]) -> OpPlan:
    """`op` with the sizes to which servers pad the weights before they call it: the padding is in the op's key."""
    sizes = {name: pad(op.shape[name], multiple) for name, multiple in multiples.items()}
    different = [f"{name} {op.shape[name]} → {size}" for name, size in sizes.items() if size != op.shape[name]]
    notes = (f"padded as {who}: {', '.join(different)}",) if different else ()
    return changed(op, shape={**op.shape, **sizes}, notes=(*op.notes, *notes))
