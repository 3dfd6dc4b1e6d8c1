"""Model, layout, device and versions → Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.contract.digest import sha256_json
from pipeline.contract.plan import MOST_RANKS, Layout, OpPlan, Plan, Untuned
from pipeline.flashinfer.features import BF16_CUDNN_FOUND, UPGRADE, is_version, too_old
from pipeline.flashinfer.moe_keys import layers_apart, overwriting
from pipeline.flashinfer.ops import TUNED_AS, is_skipped

from .buckets import default_buckets, own_buckets
from .choice import Context
from .facts import Facts, read_facts
from .find import find_model
from .ops import CUDNN_BF16, choose
from .parts import model_parts, quantizable_modules
from .problems import PlanRefused, Problems
from .quant import read_quantization
from .remarks import left_beside, remarks
from .target import Target, check_backends, gpu_arch

SEED = 20240229
UNSEEN = (
    "only config.json was read from the hub: a quantization that stands in a file beside it is not seen; "
    "give the checkpoint's folder as MODEL if it has one"
)


def _merged(planned: Sequence[OpPlan]) -> tuple[OpPlan, ...]:
    """One op for all that would be tuned alike: names joined with `+`, held by the ranks of either."""
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


def _told_apart(planned: Sequence[OpPlan], version: str) -> tuple[list[OpPlan], list[Untuned]]:
    """Refuse MoE layers that one file cannot hold: different layers whose keys are the same."""
    lost = {op.name: op for pair in overwriting(planned, version) for op in pair}
    reasons = {
        name: f"FlashInfer {version} writes only tensor shapes into this op's keys, so that these layers would "
        f"overwrite each other; {layers_apart(op.op).since} tells them apart"
        for name, op in lost.items()
    }
    return [op for op in planned if op.name not in lost], [Untuned(name, why) for name, why in reasons.items()]


def _near(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}? known: {', '.join(known)}" if close else f"known: {', '.join(known)}"


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


def _target(device: str, arch: str, problems: Problems) -> Target:
    if device == "cuda" and arch:
        return Target(device, gpu_arch(arch, problems))
    if device != "cpu" or not arch:
        problems.add(f"device {device!r} with architecture {arch!r} cannot be planned for", "say cpu, or cuda and 90a")
    return Target(device, arch)


def _check_version(version: str, problems: Problems) -> None:
    """Note a version that is none, or that the ranks would refuse after all has been built."""
    if not is_version(version):
        problems.add(f"FlashInfer version {version!r} is not a version", "write it as in 0.6.16.post3")
    elif refusal := too_old(version):
        problems.add(refusal, UPGRADE)


def _check_layout(layout: Layout, problems: Problems) -> None:
    for name in ("tp", "ep", "pp", "dp"):
        size = getattr(layout, name)
        if type(size) is not int or not 1 <= size <= MOST_RANKS:
            problems.add(f"{name.upper()}={size} is not a number of ranks", f"{name.upper()} takes 1 to {MOST_RANKS}")
    if not problems.found and layout.world > MOST_RANKS:
        problems.add(f"TP, PP and DP make {layout.world} ranks", f"{MOST_RANKS} are the most")


def _buckets(device: str, buckets: Sequence[int] | None, max_tokens: int | None, problems: Problems) -> tuple[int, ...]:
    if not buckets:
        return default_buckets(device, max_tokens)
    counts = own_buckets(buckets)
    if counts[0] < 1:
        problems.add(f"bucket {counts[0]} is not a number of tokens", "buckets count tokens, from 1 on")
    if max_tokens is not None and counts[-1] > max_tokens:
        problems.add(f"bucket {counts[-1]} is above --max-tokens={max_tokens}", "leave one of the two out")
    return counts


def make_plan(
    model: str,
    *,
    layout: Layout,
    device: str,
    arch: str,
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

    `max_tokens` and `buckets` count the tokens of one batch. `ops`, where given, are the only ones planned, by adapter
    or by product. `backends` maps adapters to the backends that compete there. `problems` are those that the caller
    has found already, to be told together.
    """
    problems, wrong = problems or Problems(), Problems()  # `wrong` leaves nothing to go on with
    _check_layout(layout, wrong)
    target = _target(device, arch, wrong)
    _check_version(flashinfer_version, problems)
    cudnn = "" if BF16_CUDNN_FOUND.of(flashinfer_version) else CUDNN_BF16
    check_backends(backends or {}, target, problems, cudnn_bf16=cudnn)
    counts = _buckets(device, buckets, max_tokens, problems)
    problems.found += wrong.found
    found = find_model(model)
    broken = Problems()
    facts, quantization = read_facts(found.name, found.config, broken), read_quantization(found.config, broken)
    problems.found += broken.found
    if wrong.found or broken.found:
        problems.check()
    context = Context(facts, target, flashinfer_version, counts, backends or {}, ops or ())
    planned: list[OpPlan] = []
    untuned: list[Untuned] = []
    parts = model_parts(facts, layout, quantization, problems)
    for part in parts:
        chosen, left = choose(part, context)
        planned += chosen
        untuned += left
    planned, skipped = _asked_for(planned, [u.name for u in untuned], ops, skip_ops, problems)
    problems.check()
    kept, lost = _told_apart(_merged(planned), flashinfer_version)
    untuned = [*untuned, *lost, *skipped, *left_beside(facts)]
    if not kept:
        raise _nothing(facts, target, untuned)
    plan = Plan(
        model=facts.name,
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
    notes = remarks(plan, facts, quantization, quantizable_modules(parts), own=bool(buckets))
    return replace(plan, notes=(*notes, UNSEEN) if found.from_hub and not quantization.groups else notes)


def _nothing(facts: Facts, target: Target, untuned: Sequence[Untuned]) -> PlanRefused:
    return PlanRefused(
        f"nothing of {facts.name} can be tuned on {target.arch}",
        hint="the reasons are above; plan another model, architecture or set of --ops",
        details=[f"{part.name}: {part.reason}" for part in _grouped(untuned)],
    )
