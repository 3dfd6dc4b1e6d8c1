"""Model, layout, device and versions → Plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.contract.digest import sha256_json
from pipeline.contract.plan import MOST_RANKS, Layout, OpPlan, Plan, Untuned
from pipeline.contract.text import closest
from pipeline.flashinfer.features import NEWEST_READ, UPGRADE, is_newer_than_read, is_version, too_old
from pipeline.flashinfer.moe_keys import layers_apart, overwriting
from pipeline.flashinfer.ops import TUNED_AS, is_skipped

from .buckets import default_buckets
from .consumers import found_by_none, who_loads, with_consumers
from .model_config import ModelConfig, read_model_config
from .model_source import UNSEEN, find_model
from .moe import moe_op
from .ops import Context, NotTuned, Target, check_backends, cpu_ops, gemm_op
from .problems import PlanRefused, Problems
from .quantization import Quantization, read_quantization
from .sharding import Part, model_parts, quantizable_modules

SEED = 20240229


def make_plan(
    model: str,
    *,
    layout: Layout,
    target: Target,
    flashinfer_version: str,
    max_tokens: int | None = None,
    buckets: Sequence[int] | None = None,
    round_up: bool = False,
    skip_ops: Sequence[str] = (),
    ops: Sequence[str] | None = None,
    backends: Mapping[str, Sequence[str]] | None = None,
    seed: int = SEED,
    problems: Problems | None = None,
) -> Plan:
    """Make the plan of one model; raise `ModelUnknown`, `ModelUnreadable`, or `PlanRefused` with every problem.

    `max_tokens` and `buckets` count the tokens of one batch. `ops`, where given, are the only ones planned, by op or by
    product. `backends` maps ops to the backends that compete there. `problems` are those that the caller has found
    already, to be shown together.
    """
    problems = problems or Problems()
    _check_version(flashinfer_version, problems)
    counts = default_buckets(target.device, max_tokens) if not buckets else tuple(sorted(set(buckets)))
    if buckets and max_tokens is not None and counts[-1] > max_tokens:
        problems.add(f"bucket {counts[-1]} is above --max-tokens={max_tokens}", "leave one of the two out")
    if too_many := layout.world > MOST_RANKS:
        problems.add(f"TP, PP and DP make {layout.world} ranks", f"{MOST_RANKS} are the most")
    found = find_model(model)
    broken = Problems()
    config = read_model_config(found.name, found.config, broken)
    quantization = read_quantization(found.config, broken)
    problems.found += broken.found
    if too_many or broken.found or (target.device == "cuda" and not target.sm):
        problems.check()
    check_backends(backends or {}, target, flashinfer_version, problems)
    context = Context(config, target, flashinfer_version, counts, backends or {}, ops or ())
    parts = model_parts(config, layout, quantization, problems)
    planned: list[OpPlan] = []
    untuned: list[Untuned] = []
    for part in parts:
        chosen, left = _choose(part, context)
        planned += chosen
        untuned += left
    planned, skipped = _asked_for(planned, [u.name for u in untuned], ops, skip_ops, problems)
    problems.check()
    kept, lost = _without_collisions(_merged(planned), flashinfer_version)
    untuned = [*untuned, *lost, *skipped, *_outside_layers(config)]
    if not kept:
        raise PlanRefused(
            f"nothing of {config.name} can be tuned on {target.arch}",
            hint="the reasons are above; plan another model, architecture or set of --ops, or let a server warm up "
            f"its own caches: {server_command(model)}",
            details=[f"{part.name}: {part.reason}" for part in _grouped(untuned)],
        )
    plan = Plan(
        model=config.name,
        device=target.device,
        arch=target.arch,
        flashinfer_version=flashinfer_version,
        layout=layout,
        ops=tuple(kept),
        # FlashInfer itself rounds up to its own buckets: a server without any context must ask for the same entries.
        round_up=round_up or (target.device == "cuda" and not buckets),
        skip_ops=tuple(dict.fromkeys(skip_ops)),
        seed=seed,
        untuned=_grouped(untuned),
    )
    unseen = [UNSEEN] if found.from_hub and not quantization.groups else []
    notes = [*found.notes, *unseen, *_notes(plan, config, quantization, parts, custom=bool(buckets))]
    return replace(plan, notes=tuple(notes))


def server_command(model: str) -> str:
    """What to type for a model whose entries no server looks up."""
    command = f"`pipeline build {model} --server vllm` (make image MODEL={model} SERVER=vllm)"
    return f"{command}, on GPUs with BASE_IMAGE= and SERVER_ARGS="


def _check_version(version: str, problems: Problems) -> None:
    """Note a version that is none, or that the ranks would refuse after all has been built."""
    if not is_version(version):
        problems.add(f"FlashInfer version {version!r} is not a version", "write it as in 0.6.16.post3")
    elif refusal := too_old(version):
        problems.add(refusal, UPGRADE)


def _choose(part: Part, context: Context) -> tuple[list[OpPlan], list[Untuned]]:
    """The ops of one part, and what is left out of it with the reason."""
    sm, version = context.target.sm, context.version
    if context.target.device == "cpu":
        return [with_consumers(op, sm, version) for op in cpu_ops(part, context)], []
    try:
        op = (gemm_op if part.moe is None else moe_op)(part, context)
    except NotTuned as refusal:
        return [], [Untuned(part.name, str(refusal))]
    op = with_consumers(op, sm, version)
    missing = [b for b in context.buckets if b not in op.buckets]
    if not missing:
        return [op], []
    assert part.moe is not None
    reason = f"{part.moe.top_k} experts per token leave some of {part.moe.ep} expert-parallel ranks without tokens"
    return [op], [Untuned(f"{part.name} at {', '.join(map(str, missing))} tokens", reason)]


def _merged(planned: Sequence[OpPlan]) -> tuple[OpPlan, ...]:
    """One op for all that would be tuned alike: names joined with `+`, on the ranks of either."""
    groups: dict[str, list[OpPlan]] = {}
    for op in planned:
        groups.setdefault(sha256_json({**op.meaning(), "ranks": []}), []).append(op)
    return tuple(
        replace(
            same[0],
            name="+".join(op.name for op in same),
            layers=sum(op.layers for op in same),
            ranks=tuple(sorted({r for op in same for r in op.ranks})) if all(op.ranks for op in same) else (),
            notes=tuple(dict.fromkeys(note for op in same for note in op.notes)),
        )
        for same in groups.values()
    )


def _without_collisions(planned: Sequence[OpPlan], version: str) -> tuple[list[OpPlan], list[Untuned]]:
    """Leave out MoE layers that one file cannot keep apart: different layers whose keys are the same."""
    lost = {op.name: op for pair in overwriting(planned, version) for op in pair}
    why = "FlashInfer {} writes only tensor shapes into this op's keys, so that these layers would overwrite each other"
    reasons = [
        Untuned(name, f"{why.format(version)}; {layers_apart(op.op).since} tells them apart")
        for name, op in lost.items()
    ]
    return [op for op in planned if op.name not in lost], reasons


def _near(word: str, known: Sequence[str]) -> str:
    close = closest(word, known)
    return f"{f'did you mean {close}? ' if close else ''}known: {', '.join(known)}"


def _asked_for(
    planned: Sequence[OpPlan],
    left_out: Sequence[str],
    ops: Sequence[str] | None,
    skip_ops: Sequence[str],
    problems: Problems,
) -> tuple[list[OpPlan], list[Untuned]]:
    """What `--ops` keeps and `--skip-ops` leaves."""
    names = [*dict.fromkeys(op.name for op in planned), *dict.fromkeys(left_out), *TUNED_AS]
    for word in ops or ():
        if planned and word not in names:
            problems.add(f"--ops {word}: no such op in this plan", _near(word, names))
    skippable = [*TUNED_AS, *(tuned for all_of in TUNED_AS.values() for tuned in all_of if tuned not in TUNED_AS)]
    for word in skip_ops:
        if word not in skippable:
            problems.add(f"--skip-ops {word}: FlashInfer tunes no such op here", _near(word, skippable))
    kept: list[OpPlan] = []
    left: list[Untuned] = []
    for op in planned:
        if is_skipped(op.op, skip_ops):
            left.append(Untuned(op.name, "--skip-ops leaves it to FlashInfer's default"))
        elif ops and not {op.name, op.op} & set(ops):
            left.append(Untuned(op.name, "not among --ops"))
        else:
            kept.append(op)
    return kept, left


def _grouped(untuned: Sequence[Untuned]) -> tuple[Untuned, ...]:
    """One line for each reason, the names joined with `+`."""
    reasons: dict[str, list[str]] = {}
    for part in untuned:
        reasons.setdefault(part.reason, []).append(part.name)
    return tuple(Untuned("+".join(dict.fromkeys(names)), reason) for reason, names in reasons.items())


def _outside_layers(model: ModelConfig) -> Iterator[Untuned]:
    """Parts of the model that are no products of its decoder layers."""
    for name in model.parts_left_out:
        yield Untuned(name, "only the language model is planned")
    if model.mla:
        reason = "decoding multiplies by the absorbed kv_b head by head; only plain products and MoE layers are planned"
        yield Untuned("absorbed_kv_b", reason)
    if model.family == "qwen2_moe":
        yield Untuned("shared_expert_gate", "one row of weights, no product worth tuning")
    if model.drafts:
        yield Untuned("mtp", "multi-token prediction layers run only under speculative decoding")


def _notes(
    plan: Plan, model: ModelConfig, quantization: Quantization, parts: Sequence[Part], *, custom: bool
) -> Iterator[str]:
    """What a person should know about a plan beside its ops."""
    if model.assumed:
        yield f"config.json leaves out {', '.join(model.assumed)}: these are the values of the model's class"
    if plan.device == "cpu":
        replaced = [model.dtype, *dict.fromkeys(str(scheme) for _, scheme in quantization.groups)]
        yield f"no GPU: products run in float32 in place of {', '.join(replaced)}; their times say nothing about a GPU"
    else:
        yield from _cuda_notes(plan, custom=custom)
    for targets, scheme in quantization.unused(quantizable_modules(parts)):
        yield (
            f"quantization_config: its group of {scheme} has the targets {targets}, which no product of a decoder "
            "layer is: nothing is planned with it"
        )


def _cuda_notes(plan: Plan, *, custom: bool) -> Iterator[str]:
    if is_newer_than_read(plan.flashinfer_version):
        yield (
            f"FlashInfer {plan.flashinfer_version} is taken to write and find entries as {NEWEST_READ} does, "
            "the newest that was read for this; where it does not, the replay of the finished image fails"
        )
    if not found_by_none(plan.ops):
        yield who_loads(plan.flashinfer_version)
    if custom:
        rounding = "up" if plan.round_up else "down"
        yield (
            f"custom buckets: a server finds these entries inside autotune(False, tuning_buckets=…, "
            f"round_up={plan.round_up}), which rounds {rounding}"
        )
