"""Running what was chosen against a reference; a tactic that is wrong or fails is blocked, and its bucket tuned again.

FlashInfer's own blocklist takes a tactic out of a runner's offer for every shape. Many tactics are places in a list
that differs from shape to shape, so the block is put up for the bucket that is tuned again and taken down after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contract.errors import WarmUpError
from pipeline.contract.plan import OpPlan

from . import flashinfer_api
from .coverage import call, settings
from .guard import survive
from .judging.court import judge_op
from .tokens import answering, replay_tokens

if TYPE_CHECKING:
    from .ops import Case
    from .session import Session

Gather = Callable[[Any], list[Any]]
_TRIES = 8  # tactics that may prove wrong at one bucket


class DefaultWrong(WarmUpError):
    """What FlashInfer runs untuned is wrong or fails: there is nothing left to choose."""


class NoSoundTactic(WarmUpError):
    """One tactic after another was wrong."""


@dataclass(frozen=True)
class Wrong:
    """An entry whose tactic is wrong, or fails, at a token count that its bucket answers."""

    bucket: int
    tokens: int
    entry: str
    custom_op: str
    runner: str
    tactic: Any
    reason: str


def prove(session: Session, op: OpPlan, case: Case, known: Collection[str], gather: Gather) -> None:
    """Check the choice at each bucket of `op`, and replace what is wrong on any rank until nothing is.

    The ranks that `gather` reaches may each bring other buckets of one op.

    `known` are the entries from before: they are not judged again. Raises `DefaultWrong` or `NoSoundTactic`.
    """
    proof = Proof(session, op, case, known, gather)
    todo: Sequence[int] = op.buckets
    for _ in range(_TRIES):
        todo = proof.replace_wrong(todo)
        if not todo:
            return
    raise NoSoundTactic(
        f"{op.name}: {_TRIES} tactics in turn were wrong at {', '.join(map(str, todo))} tokens",
        details=[f"{b['runner']} {b['tactic']}: {b['reason']}" for b in session.blocked if b["op"] == op.name],
        hint="leave the op out with --skip-ops, and report it to FlashInfer",
    )


@dataclass(frozen=True)
class Proof:
    """One op, some or all of its buckets, on this rank and those that `gather` reaches."""

    session: Session
    op: OpPlan
    case: Case
    known: Collection[str]
    gather: Gather

    def replace_wrong(self, buckets: Sequence[int]) -> list[int]:
        """Run the choices at `buckets`; tune those again that are wrong on any rank, and return them."""
        self.session.ranks.steps.say(f"checking the results of {self.op.name} ({self.op.op})")
        said = self.gather([one for bucket in buckets if (one := self._wrong(bucket))])
        found = {one.bucket: one for rank in reversed(said) for one in rank}
        for one in found.values():
            self._block(one)
            self._again(one)
        return sorted(found)

    def _wrong(self, bucket: int) -> Wrong | None:
        """Run the choice at every token count of a replay that this bucket answers."""
        served = next(one for one in self.session.plan.ops if one.name == self.op.name)
        counts = [bucket]
        if served.options.get("hits") != "exact":
            counts = [t for t in replay_tokens(served.buckets) if answering(served, self.session.plan, t) == bucket]
        with settings(self.session.plan, served, tune=False), torch.no_grad():
            for tokens in counts:
                self.session.ranks.steps.tick(f"{tokens} tokens")
                reason = self._reason(tokens)
                looked = [one for one in self.session.tuner.watch.lookups if one.hit]
                if reason and looked:
                    last = looked[-1]
                    return Wrong(bucket, tokens, last.key, last.custom_op, last.runner, last.tactic, reason)
        return None

    def _reason(self, tokens: int) -> str:
        """Why the result at a token count is wrong, or nothing."""
        try:
            excess = self.case.excess(tokens, call(self.session.tuner, self.case, tokens).out)
        except Exception as failure:  # noqa: BLE001 - a tactic may fail in any way
            survive(failure)
            return f"{type(failure).__name__}: {str(failure).strip()[:200]}"
        self.session.tuner.tried(None)
        return "" if excess <= 1.0 else f"its output is {excess:.3g} times the bound away from the reference"

    def _block(self, one: Wrong) -> None:
        """Note a wrong tactic for the manifest; raise `DefaultWrong` where nothing stands behind it."""
        if one.tactic == -1:
            raise DefaultWrong(
                f"{self.op.name} at {one.tokens} tokens: FlashInfer's default, {one.runner}, is wrong: {one.reason}",
                hint="leave the op out with --skip-ops, and report it to FlashInfer",
            )
        self.session.blocked.append({"op": self.op.name, **asdict(one)})

    def _again(self, one: Wrong) -> None:
        """Tune one bucket without what is blocked there."""
        session, op = self.session, replace(self.op, buckets=(one.bucket,))
        flashinfer_api.forget(session.tuner, one.entry)
        session.measured.judged.pop(one.entry, None)
        session.ranks.steps.say(f"tuning {op.name} at {one.bucket} tokens again, without {one.runner} {one.tactic}")
        here = [b for b in session.blocked if (b["op"], b["bucket"]) == (op.name, one.bucket)]
        session.tuner.watch.clear()
        with blocked(session.tuner, here), settings(session.plan, op, tune=True):
            self.case.call(one.bucket)
        session.measured.add(op, session.tuner.watch.samples)
        judge_op(session, op, self.case, self.known, self.gather)


@contextlib.contextmanager
def blocked(tuner: Any, tactics: Sequence[dict[str, Any]]) -> Iterator[None]:  # noqa: ANN401 - an AutoTuner
    """Keep these tactics out of what their runners offer to FlashInfer's tuning."""
    before = {name: set(values) for name, values in tuner._blocklist._invalid.items()}
    for one in tactics:
        name = f"{one['custom_op']}::{one['runner']}"
        tuner._blocklist._invalid.setdefault(name, set()).add(flashinfer_api.tactic_hashable(one["tactic"]))
    try:
        yield
    finally:
        tuner._blocklist._invalid.clear()
        tuner._blocklist._invalid.update(before)
