"""How the work of a plan is shared among the ranks, and which way this FlashInfer allows. No torch here.

synchronized  every rank measures everything, FlashInfer averages each tactic's time over the ranks
leader        the first rank that has an op measures it, the others use its result
independent   every rank measures everything alone; of use only where all choose alike
sharded       op by bucket is dealt out, each rank measures its share, all results are joined
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pipeline.contract.digest import canonical_json
from pipeline.contract.errors import UsageError
from pipeline.contract.plan import OpPlan, Plan
from pipeline.flashinfer.features import UPGRADE, is_version, too_old
from pipeline.flashinfer.ops import LEADER, check_leader

SYNCHRONIZED, INDEPENDENT, SHARDED = "synchronized", "independent", "sharded"
STRATEGIES = (SYNCHRONIZED, LEADER, INDEPENDENT, SHARDED)


class StrategyRefused(UsageError):
    """This FlashInfer does not allow the strategy that was asked for."""


class FlashInferOfNoVersion(UsageError):
    """What FlashInfer calls its version is none."""


class FlashInferTooOld(UsageError):
    """This FlashInfer must not be tuned with, whatever the strategy."""


@dataclass(frozen=True)
class Strategy:
    """A choice and why it was made; both go into the manifest."""

    name: str
    reason: str

    @property
    def together(self) -> bool:
        """Whether the ranks measure each tactic together."""
        return self.name == SYNCHRONIZED


def check_version(version: str) -> None:
    """Refuse a FlashInfer that cannot be tuned soundly; raise `FlashInferTooOld` with the reason.

    Raises `FlashInferOfNoVersion` where nothing can be said of it.
    """
    if not is_version(version):
        raise FlashInferOfNoVersion(
            f"FlashInfer's version is {version!r}, which cannot be compared",
            hint="use a published one, 0.6.16.post3 or newer, in versions.json",
        )
    if refusal := too_old(version):
        raise FlashInferTooOld(refusal, hint=UPGRADE)


def choose(asked: str, plan: Plan, world: int, *, version: str, process_group: bool) -> Strategy:
    """Take the strategy that was asked for (empty: none), or the best that FlashInfer allows.

    `process_group` says whether FlashInfer has `set_autotune_process_group`. Raises `StrategyRefused`
    and `LeaderUnfit`.
    """
    has = f"FlashInfer {version} {'has' if process_group else 'lacks'} set_autotune_process_group"
    if asked == SYNCHRONIZED and not process_group:
        raise StrategyRefused(
            f"--strategy synchronized: {has}, so ranks cannot average their times",
            hint="use --strategy sharded, or FlashInfer 0.6.16 or newer",
        )
    check_leader(asked, plan)
    name = asked or (SYNCHRONIZED if process_group else SHARDED)
    what = {
        SYNCHRONIZED: f"{world} ranks averaged the time of every tactic over a gloo group and chose alike",
        LEADER: "the first rank that has an op tuned it, the others used its result",
        INDEPENDENT: f"{world} ranks tuned alone and chose alike, which was checked entry by entry",
        SHARDED: f"each op and bucket was tuned by one of {world} ranks, the results were joined",
    }[name]
    return Strategy(name, f"asked for: {what}" if asked else f"{has}: {what}")


def holders(plan: Plan, world: int) -> list[tuple[int, ...]]:
    """For each op of the plan the ranks that have it, ascending."""
    return [tuple(sorted(op.ranks)) or tuple(range(world)) for op in plan.ops]


def share(name: str, plan: Plan, known: Sequence[Mapping[int, Sequence[int]]], rank: int) -> dict[int, tuple[int, ...]]:
    """What one rank measures alone, by index of the op; `known` says what each rank knows to be tuned.

    What is to be tuned of an op is known to its holders only, and all ranks must deal from one list.
    """
    owners = holders(plan, len(known))
    if name == SHARDED:
        return deal(plan, {i: buckets for one in known for i, buckets in one.items()}, owners).get(rank, {})
    mine = {i: tuple(buckets) for i, buckets in known[rank].items() if buckets}
    return {i: buckets for i, buckets in mine.items() if name != LEADER or owners[i][0] == rank}


def deal(
    plan: Plan, work: Mapping[int, Sequence[int]], holders: Sequence[Sequence[int]]
) -> dict[int, dict[int, tuple[int, ...]]]:
    """Deal the buckets to tune (`work`, by index of the op) out over the ranks that have each op.

    Returns for each rank its buckets by op. The dearest piece goes first, each to the rank with the least so far;
    what has one key goes to one rank. The same on every rank, since it reads nothing but its arguments.
    """
    groups: dict[bytes, list[tuple[int, int]]] = {}
    for index, buckets in work.items():
        op = plan.ops[index]
        for bucket in buckets:
            same = canonical_json([op.op, dict(op.shape), dict(op.dtypes), bucket])
            groups.setdefault(same, []).append((index, bucket))
    pieces = sorted(groups.values(), key=lambda g: (-_cost(plan, *g[0]), g[0]))
    loads = dict.fromkeys((rank for ranks in holders for rank in ranks), 0.0)
    dealt: dict[int, dict[int, list[int]]] = {}
    for piece in pieces:
        able = sorted(set.intersection(*(set(holders[index]) for index, _ in piece)) or set(holders[piece[0][0]]))
        rank = min(able, key=lambda r: (loads[r], r))
        loads[rank] += _cost(plan, *piece[0])
        for index, bucket in piece:
            dealt.setdefault(rank, {}).setdefault(index, []).append(bucket)
    return {
        rank: {index: tuple(sorted(buckets)) for index, buckets in sorted(ops.items())} for rank, ops in dealt.items()
    }


def _cost(plan: Plan, index: int, bucket: int) -> float:
    """An estimate of what tuning one bucket takes, to share the work evenly; only ratios matter.

    Proportional to the weights and, from the token count on at which arithmetic outweighs reading them, to tokens.
    """
    floor = 256 if plan.device == "cuda" else 8
    return weights(plan.ops[index]) * float(bucket + floor)


def weights(op: OpPlan) -> int:
    """The elements of weights that one token meets: `n·k` of a GEMM, of an MoE three matrices of each expert
    that it is sent to on this rank.
    """
    if "n" in op.shape:
        return prod(op.shape.get(name, 1) for name in ("n", "k"))
    experts = op.shape.get("experts", 1)
    here = op.shape.get("top_k", 1) * op.shape.get("local_experts", experts) / experts
    return max(1, int(3 * here * prod(op.shape.get(name, 1) for name in ("hidden", "intermediate"))))
