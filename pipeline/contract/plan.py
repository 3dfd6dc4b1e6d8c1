"""The plan: what will be tuned, for which shapes, on which ranks. Made on the host, read in the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .digest import sha256_json
from .errors import UsageError

SCHEMA = 1
_AGAIN = "make the plan again with `pipeline plan`"
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

    `op` names an adapter of `pipeline.tune.ops`. `shape` holds sizes in elements as one rank sees them: for a
    GEMM `n` and `k` (a row-major activation `[tokens, k]` times a weight `[n, k]` transposed), for MoE layers
    `experts`, `local_experts`, `hidden`, `intermediate`, `top_k`, and `tp` and `ep`: how many ranks divide each
    expert and how many deal the experts out. `dtypes` maps the adapter's tensor names to torch dtype names. `buckets`
    are token counts, ascending. `backends` compete for each bucket; empty where an adapter has no choice. `options`
    are read by the adapter (docs/models.md lists them). `ranks` lists the ranks that hold the op; empty means all.
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
class EngineRun:
    """An engine that tunes in its own start, instead of ops that we name.

    `name` is `vllm` or `sglang`, `version` what its package says. `arguments` are the words after its serve command, as
    at run time; `model` the path among them, in which `config` (file name to text) is laid for the tuned stage.
    `variables` are set for it, as at run time.
    """

    name: str
    version: str
    model: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All that a tuning run is told. `device` is `cpu` or `cuda`; `arch` FlashInfer's name for it.

    `notes` are remarks for people about the whole plan, outside the digest like `untuned`. A plan with an `engine` has
    no ops: what is tuned is the engine's own choice.
    """

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
    engine: EngineRun | None = None

    def meaning(self) -> dict[str, Any]:
        """What the digest covers: ops, shapes, dtypes, buckets, rounding, skip_ops, rank layout, an engine's run."""
        more = {} if self.engine is None else {"engine": asdict(self.engine)}
        return {
            **more,
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
        if self.engine is None:
            del whole["engine"]
        for op in whole["ops"]:
            if not op["unserved"]:
                del op["unserved"]
        return {"schema": SCHEMA, "digest": self.digest, **whole}

    @staticmethod
    def from_json(value: object) -> Plan:
        """Read a plan; raise `PlanInvalid` naming the field when it is not one."""
        return _plan(value)


def _need(value: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:  # noqa: ANN401 - checked here
    if name not in value:
        raise PlanInvalid(f"{where}.{name} is missing", hint=_AGAIN)
    found = value[name]
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
        raise PlanInvalid(
            f"{where}.{name} is {type(found).__name__}, not what a plan holds",
            hint=_AGAIN,
        )
    return found


def _texts(value: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A list of texts, empty where there is none."""
    found = _need({name: (), **value}, name, (list, tuple), where)
    if not all(isinstance(one, str) for one in found):
        raise PlanInvalid(f"{where}.{name} holds what is not text", hint=_AGAIN)
    return tuple(found)


def _seed(value: Mapping[str, Any]) -> int:
    seed: int = _need(value, "seed", int, "$")
    if not 0 <= seed < MOST_SEEDS:
        raise PlanInvalid(f"$.seed is not one of 0 to {MOST_SEEDS - 1}", hint=_AGAIN)
    return seed


def _untuned(value: Mapping[str, Any]) -> tuple[Untuned, ...]:
    found = []
    for i, one in enumerate(_need({"untuned": (), **value}, "untuned", (list, tuple), "$")):
        where = f"$.untuned[{i}]"
        if not isinstance(one, dict):
            raise PlanInvalid(f"{where} is not an object", hint=_AGAIN)
        found.append(Untuned(_need(one, "name", str, where), _need(one, "reason", str, where)))
    return tuple(found)


def _layout(value: Mapping[str, Any]) -> Layout:
    layout = Layout(**{name: _need(value, name, int, "$.layout") for name in ("tp", "ep", "pp", "dp")})
    if min(vars(layout).values()) < 1 or max(layout.world, layout.ep) > MOST_RANKS:
        raise PlanInvalid(f"$.layout is {vars(layout)}, it must make 1 to {MOST_RANKS} ranks", hint=_AGAIN)
    return layout


def _op(value: object, where: str, world: int) -> OpPlan:
    if not isinstance(value, dict):
        raise PlanInvalid(f"{where} is not an object", hint=_AGAIN)
    buckets = tuple(_need(value, "buckets", (list, tuple), where))
    if not buckets or any(type(b) is not int or b < 1 for b in buckets) or list(buckets) != sorted(set(buckets)):
        raise PlanInvalid(
            f"{where}.buckets must be ascending positive token counts, found {list(buckets)}",
            hint=_AGAIN,
        )
    shape, dtypes = (_need(value, name, dict, where) for name in ("shape", "dtypes"))
    ranks = _need({"ranks": (), **value}, "ranks", (list, tuple), where)
    options = _need({"options": {}, **value}, "options", dict, where)
    for name, right in {
        "options": all(isinstance(option, str) for option in options.values()),
        "shape": all(type(size) is int and size > 0 for size in shape.values()),
        "dtypes": all(isinstance(dtype, str) for dtype in dtypes.values()),
        "ranks": all(type(rank) is int and 0 <= rank < world for rank in ranks),
    }.items():
        if not right:
            raise PlanInvalid(f"{where}.{name} is {value[name]}, which is none for {world} ranks", hint=_AGAIN)
    return OpPlan(
        name=_need(value, "name", str, where),
        op=_need(value, "op", str, where),
        shape=shape,
        dtypes=dtypes,
        buckets=buckets,
        backends=_texts(value, "backends", where),
        options=options,
        ranks=tuple(ranks),
        layers=_need({"layers": 1, **value}, "layers", int, where),
        notes=_texts(value, "notes", where),
        unserved=str(value.get("unserved", "")),
    )


def _engine(value: object) -> EngineRun | None:
    if value is None:
        return None
    where = "$.engine"
    if not isinstance(value, dict):
        raise PlanInvalid(f"{where} is not an object", hint=_AGAIN)
    texts = {name: _need(value, name, str, where) for name in ("name", "version", "model")}
    maps = {name: _need(value, name, dict, where) for name in ("variables", "config")}
    words = tuple(_need(value, "arguments", (list, tuple), where))
    if not all(isinstance(one, str) for one in (*words, *maps["variables"].values(), *maps["config"].values())):
        raise PlanInvalid(f"{where} holds what is not text", hint=_AGAIN)
    return EngineRun(**texts, arguments=words, **maps)


def _plan(value: object) -> Plan:
    if not isinstance(value, dict):
        raise PlanInvalid("the plan is not a JSON object", hint="make it with `pipeline plan`")
    if value.get("schema") != SCHEMA:
        raise PlanInvalid(
            f"plan schema {value.get('schema')!r}, this version reads {SCHEMA}",
            hint=_AGAIN,
        )
    layout = _layout(_need(value, "layout", dict, "$"))
    plan = Plan(
        model=_need(value, "model", str, "$"),
        device=_need(value, "device", str, "$"),
        arch=_need(value, "arch", str, "$"),
        flashinfer_version=_need(value, "flashinfer_version", str, "$"),
        layout=layout,
        ops=tuple(_op(op, f"$.ops[{i}]", layout.world) for i, op in enumerate(_need(value, "ops", (list, tuple), "$"))),
        round_up=bool(_need(value, "round_up", bool, "$")),
        skip_ops=_texts(value, "skip_ops", "$"),
        seed=_seed(value),
        untuned=_untuned(value),
        notes=_texts(value, "notes", "$"),
        engine=_engine(value.get("engine")),
    )
    stated = value.get("digest")
    if stated is not None and stated != plan.digest:
        raise PlanInvalid(
            f"plan digest is {plan.digest[:12]}…, the file says {str(stated)[:12]}…: it was edited",
            hint=_AGAIN,
        )
    return plan
