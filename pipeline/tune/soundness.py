"""Running what was chosen against a reference; a tactic that is wrong or fails is blocked, and its bucket tuned again.

FlashInfer's own blocklist takes a tactic out of a runner's offer for every shape. Many tactics are places in a list
that differs from shape to shape, so the block is put up for the bucket that is tuned again and taken down after it.

A call may look up several entries before it runs, as the two products of a MoE layer do. The wrong one is found by
letting each answer with the default in turn. Memory that runs out in the reference blames no tactic: the reference is
made smaller, and the manifest says so. Where it runs out in the call, the default decides: if it lacks memory too, the
inputs are too large for this device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contract.errors import WarmUpError
from pipeline.contract.plan import OpPlan

from . import flashinfer_api
from .compare.compare import compare_op
from .coverage import call, settings
from .guard import OUT_OF_MEMORY, OutOfMemory, survive
from .ops.reference import excess_of
from .tokens import answering, replay_tokens
from .tuner import Lookup

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


def check_choices(session: Session, op: OpPlan, case: Case, known: Collection[str], gather: Gather) -> None:
    """Check the choice at each bucket of `op`, and replace what is wrong on any rank until nothing is.

    The ranks that `gather` reaches may each bring other buckets of one op. `known` are the entries from before: they
    are not compared again. Raises `DefaultWrong` or `NoSoundTactic`.
    """
    check = _Check(session, op, case, known, gather)
    todo: Sequence[int] = op.buckets
    for _ in range(_TRIES):
        todo = check.replace_wrong(todo)
        if not todo:
            return
    raise NoSoundTactic(
        f"{op.name}: {_TRIES} tactics in turn were wrong at {', '.join(map(str, todo))} tokens",
        details=[f"{b['runner']} {b['tactic']}: {b['reason']}" for b in session.blocked if b["op"] == op.name],
        hint="leave the op out with --skip-ops, and report it to FlashInfer",
    )


@dataclass(frozen=True)
class _Check:
    """One op, some or all of its buckets, on this rank and those that `gather` reaches."""

    session: Session
    op: OpPlan
    case: Case
    known: Collection[str]
    gather: Gather

    def replace_wrong(self, buckets: Sequence[int]) -> list[int]:
        """Run the choices at `buckets`; tune those again that are wrong on any rank, and return them."""
        self.session.ranks.steps.say(f"checking the results of {self.op.name} ({self.op.op})")
        said = self.gather([self._wrong(bucket) for bucket in buckets])
        found: dict[int, dict[str, Wrong]] = {}
        for one in (one for rank in said for wrongs in rank for one in wrongs):
            found.setdefault(one.bucket, {}).setdefault(one.entry, one)
        for bucket, wrongs in sorted(found.items()):
            for one in wrongs.values():
                self._block(one)
            self._again(bucket, list(wrongs.values()))
        return sorted(found)

    def _wrong(self, bucket: int) -> list[Wrong]:
        """Run the choice at every token count of a replay that this bucket answers; the entries to blame."""
        served = next(one for one in self.session.plan.ops if one.name == self.op.name)
        counts = [bucket]
        if served.options.get("hits") != "exact":
            counts = [t for t in replay_tokens(served.buckets) if answering(served, self.session.plan, t) == bucket]
        with settings(self.session.plan, served, tune=False), torch.no_grad():
            for tokens in counts:
                self.session.ranks.steps.tick(f"{tokens} tokens")
                if reason := self._reason(tokens):
                    hits = {one.key: one for one in self.session.tuner.watch.lookups if one.hit}
                    blamed = self._blamed(tokens, list(hits.values()))
                    return [Wrong(bucket, tokens, b.key, b.custom_op, b.runner, b.tactic, reason) for b in blamed]
        return []

    def _blamed(self, tokens: int, hits: Sequence[Lookup]) -> list[Lookup]:
        """Those of the entries that a call looked up without which it is right; all that are tuned, where none is."""
        tuned = [one for one in hits if one.tactic != -1]
        if len(hits) == 1 or not tuned:
            return list(hits[-1:])
        for one in tuned:
            with flashinfer_api.defaults_for(self.session.tuner, {one.key}):
                if not self._reason(tokens):
                    return [one]
        return tuned

    def _reason(self, tokens: int) -> str:
        """Why the result at a token count is wrong, or nothing. Raises `OutOfMemory` where the default lacks it too."""
        tuner = self.session.tuner
        try:
            out = call(tuner, self.case, tokens).out
        except Exception as failure:  # noqa: BLE001 - a tactic may fail in any way
            if isinstance(failure, OUT_OF_MEMORY):
                self._need_default(tokens, failure)
            survive(failure)
            return f"{type(failure).__name__}: {str(failure).strip()[:200]}"
        tuner.idle()
        excess, said = excess_of(self.case, tokens, out)
        if said and said not in self.session.notes:
            self.session.notes.append(f"{self.op.name} at {tokens} tokens: {said}")
        return "" if excess <= 1.0 else f"its output is {excess:.3g} times the bound away from the reference"

    def _need_default(self, tokens: int, failure: Exception) -> None:
        """Raise `OutOfMemory` where the default lacks memory too, so that it is not the tactics that need so much."""
        tuner = self.session.tuner
        looked = list(tuner.watch.lookups)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with flashinfer_api.defaults_for(tuner, {one.key for one in looked}):
            try:
                call(tuner, self.case, tokens)
            except OUT_OF_MEMORY:
                raise OutOfMemory(
                    f"out of memory while running {self.op.name} at {tokens} tokens, with the default too",
                    details=[f"{type(failure).__name__}: {failure}"],
                    hint="nothing was saved; free memory, plan with a smaller --max-tokens, or --skip-ops",
                ) from failure
        tuner.idle()
        tuner.watch.lookups[:] = looked

    def _block(self, one: Wrong) -> None:
        """Note a wrong tactic for the manifest; raise `DefaultWrong` where nothing stands behind it."""
        if one.tactic == -1:
            raise DefaultWrong(
                f"{self.op.name} at {one.tokens} tokens: FlashInfer's default, {one.runner}, is wrong: {one.reason}",
                hint="leave the op out with --skip-ops, and report it to FlashInfer",
            )
        self.session.blocked.append({"op": self.op.name, **asdict(one)})

    def _again(self, bucket: int, wrongs: Sequence[Wrong]) -> None:
        """Tune one bucket without what is blocked there."""
        session, op = self.session, replace(self.op, buckets=(bucket,))
        for one in wrongs:
            flashinfer_api.forget(session.tuner, one.entry)
            session.measured.compared.pop(one.entry, None)
        names = ", ".join(f"{one.runner} {one.tactic}" for one in wrongs)
        session.ranks.steps.say(f"tuning {op.name} at {bucket} tokens again, without {names}")
        here = [b for b in session.blocked if (b["op"], b["bucket"]) == (op.name, bucket)]
        session.tuner.watch.clear()
        with flashinfer_api.without(session.tuner, here), settings(session.plan, op, tune=True):
            self.case.call(bucket)
        session.measured.add(op, session.tuner.watch.samples)
        compare_op(session, op, self.case, self.known, self.gather)
