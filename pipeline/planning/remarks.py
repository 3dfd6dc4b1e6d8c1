"""What a person should know about a plan beside its ops: remarks, and the parts of a model outside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.contract.plan import OpPlan, Plan, Untuned
from pipeline.flashinfer.features import NEWEST_READ, is_newer_than_read

from .facts import Facts
from .quant import Quantization
from .served import found_by_none, who_loads

SLOW_FLOP = 2e11  # about ten seconds of one pass on two ordinary cores
ASSUMED_FLOPS = 2e10  # float32 operations per second of one rank on a shared processor; an order of magnitude


def left_beside(facts: Facts) -> list[Untuned]:
    """Parts of the model that are no products of its decoder layers."""
    found = [Untuned(name, "only the language model is planned") for name in facts.parts_left_out]
    if facts.mla:
        reason = "decoding multiplies by the absorbed kv_b head by head; only plain products and MoE layers are planned"
        found.append(Untuned("absorbed_kv_b", reason))
    if facts.family == "qwen2_moe":
        found.append(Untuned("shared_expert_gate", "one row of weights, no product worth tuning"))
    if facts.drafts:
        found.append(Untuned("mtp", "multi-token prediction layers run only under speculative decoding"))
    return found


def flop(op: OpPlan) -> int:
    """Floating point operations of one run of a product at every bucket."""
    return sum(2 * tokens * op.shape["n"] * op.shape["k"] for tokens in op.buckets)


def _cpu(plan: Plan, facts: Facts, quantization: Quantization) -> Iterator[str]:
    stands_for = [facts.dtype, *dict.fromkeys(str(scheme) for _, scheme in quantization.groups)]
    yield f"no GPU: products run in float32 and stand for {', '.join(stands_for)}; their times say nothing of a GPU"
    total = sum(flop(op) for op in plan.ops)
    if total > SLOW_FLOP:
        memory = max(4 * op.shape["n"] * op.shape["k"] for op in plan.ops)
        yield (
            f"large for a processor: one run of everything is {total / 1e12:.1f} TFLOP, very roughly "
            f"{total / ASSUMED_FLOPS:.0f} s for each tactic and repetition, and the largest weight takes "
            f"{memory / 1e9:.1f} GB; --max-tokens and --ops make it smaller"
        )


def _cuda(plan: Plan, *, own: bool) -> Iterator[str]:
    if is_newer_than_read(plan.flashinfer_version):
        yield (
            f"FlashInfer {plan.flashinfer_version} is taken to write and find entries as {NEWEST_READ} does, "
            "the newest that was read for this; where it does not, the replay of the finished image tells"
        )
    yield found_by_none(plan.ops) or who_loads(plan.flashinfer_version)
    if own:
        rounding = "up" if plan.round_up else "down"
        yield (
            f"own buckets: a server finds these entries inside autotune(False, tuning_buckets=…, "
            f"round_up={plan.round_up}), which rounds {rounding}"
        )


def remarks(
    plan: Plan, facts: Facts, quantization: Quantization, modules: Sequence[str], *, own: bool
) -> tuple[str, ...]:
    """The notes of a plan; `modules` are those that can be quantized, `own` says that the user named the buckets."""
    found = _cpu(plan, facts, quantization) if plan.device == "cpu" else _cuda(plan, own=own)
    idle = [
        f"quantization_config: its group of {scheme} has the targets {targets}, which no product of a decoder layer "
        "is: nothing is planned with it"
        for targets, scheme in quantization.idle(modules)
    ]
    return (*found, *idle)
