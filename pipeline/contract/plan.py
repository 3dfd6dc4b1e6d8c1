"""The plan: what will be tuned, for which shapes, on which ranks. Made on the host, read in the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from .decode import decode
from .digest import sha256_json
from .errors import UsageError
from .text import shown

SCHEMA = 1
MOST_SEEDS = 1 << 31
MOST_RANKS = 1024  # what is above is a slip of the finger, and would start as many processes


class PlanInvalid(UsageError):
    """plan.json does not have the shape of a plan."""


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: tensor, expert, pipeline and data parallel sizes."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks. Expert parallelism reuses the tensor and data parallel ranks."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class OpPlan:
    """One op at one set of shapes, over all its buckets.

    `op` names an adapter of `pipeline.tune.ops`. `shape` has sizes in elements as one rank sees them: for a
    GEMM `n` and `k` (a row-major activation `[tokens, k]` times a weight `[n, k]` transposed), for MoE layers
    `experts`, `local_experts`, `hidden`, `intermediate`, `top_k`, and `tp` and `ep`: how many ranks divide each
    expert and how many deal the experts out. `dtypes` maps the adapter's tensor names to torch dtype names. `buckets`
    are token counts, ascending. `backends` compete for each bucket; empty where an adapter has no choice. `options`
    are read by the adapter (docs/reference/models.md has them). `ranks` lists the ranks with the op; empty means all.
    `name`, `layers` (how many layers of the model run it), `notes` and `unserved` (why no server looks its entries up;
    empty where one may) are for people and stay out of the digest.
    """

    name: str
    op: str
    shape: Mapping[str, int]
    dtypes: Mapping[str, str]
    buckets: tuple[int, ...]
    backends: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    layers: int = 1
    notes: tuple[str, ...] = ()
    unserved: str = ""

    def meaning(self) -> dict[str, Any]:
        """The part of this op that decides what is tuned."""
        whole = asdict(self)
        del whole["name"], whole["layers"], whole["notes"], whole["unserved"]
        whole["ranks"] = sorted(self.ranks)
        return whole


@dataclass(frozen=True)
class Untuned:
    """A part of the model that this plan leaves out, and why; never dropped silently."""

    name: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The input of a tuning run. `device` is `cpu` or `cuda`; `arch` FlashInfer's name for it.

    `notes` are remarks for people about the whole plan, outside the digest like `untuned`.
    """

    SCHEMA: ClassVar[int] = SCHEMA
    DERIVED: ClassVar[tuple[str, ...]] = ("digest",)

    model: str
    device: str
    arch: str
    flashinfer_version: str
    layout: Layout
    ops: tuple[OpPlan, ...]
    round_up: bool = False
    skip_ops: tuple[str, ...] = ()
    seed: int = 0
    untuned: tuple[Untuned, ...] = ()
    notes: tuple[str, ...] = ()

    def meaning(self) -> dict[str, Any]:
        """What the digest covers: ops, shapes, dtypes, buckets, rounding, skip_ops, rank layout."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "layout": asdict(self.layout),
            "ops": sorted((op.meaning() for op in self.ops), key=sha256_json),
            "round_up": self.round_up,
            "skip_ops": sorted(self.skip_ops),
        }

    @property
    def digest(self) -> str:
        """sha256 of `meaning()`; the model's name, the seed and the order of ops do not enter."""
        return sha256_json(self.meaning())

    def to_json(self) -> dict[str, Any]:
        """The whole plan as JSON values, with its digest."""
        whole = asdict(self)
        for op in whole["ops"]:
            if not op["unserved"]:
                del op["unserved"]
        return {"schema": SCHEMA, "digest": self.digest, **whole}

    @staticmethod
    def from_json(value: object) -> Plan:
        """Read a plan; raise `PlanInvalid` naming each field that is wrong."""
        return decode(Plan, value, "the plan", PlanInvalid, hint="make the plan again with `pipeline plan`")

    def problems(self) -> Iterator[str]:
        """What is wrong though each field has the right type, for `decode`."""
        layout, world = self.layout, self.layout.world
        if min(vars(layout).values()) < 1 or max(world, layout.ep) > MOST_RANKS:
            yield f".layout: {vars(layout)} does not make 1 to {MOST_RANKS} ranks"
        if not 0 <= self.seed < MOST_SEEDS:
            yield f".seed: {self.seed} is not one of 0 to {MOST_SEEDS - 1}"
        for i, op in enumerate(self.ops):
            if not op.buckets or min(op.buckets) < 1 or list(op.buckets) != sorted(set(op.buckets)):
                yield f".ops[{i}].buckets: {shown(list(op.buckets), 60)} are not ascending positive token counts"
            if any(size < 1 for size in op.shape.values()):
                yield f".ops[{i}].shape: {shown(dict(op.shape), 60)} has a size below 1"
            if not all(0 <= rank < world for rank in op.ranks):
                yield f".ops[{i}].ranks: {shown(list(op.ranks), 60)} are not ranks of {world}"
