"""FlashInfer's AutoTuner with eyes: it notes every lookup and every measurement, and decides nothing.

Each override calls the real method and hands its result on. In a replay a measurement is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import torch

from pipeline.cache.otherkeys import other_shapes
from pipeline.contract.errors import UsageError

from . import flashinfer_api, hooks
from .guard import OUT_OF_MEMORY, TacticCrashed, TacticOutOfMemory, guarded, preparing, survive
from .steps import Attempt

_at = flashinfer_api.load()

BLOCKLIST = "FLASHINFER_TACTICS_BLOCKLIST"  # FlashInfer's variable

Theirs: TypeAlias = Any  # an argument or a result of FlashInfer's, which has no types


class BlocklistUnreadable(UsageError):
    """The user's own list of tactics to leave out is not one that FlashInfer reads."""


class ReplayMeasured(Exception):
    """Something was measured where nothing may be tuned."""


@dataclass(frozen=True)
class Lookup:
    """One call of the real `search_cache`. `key` is the file key that answered; on a miss, the first runner's.

    `profile` is the nearest profile, which all runners share at one bucket.
    """

    custom_op: str
    hit: bool
    key: str
    profile: Any
    runner: str
    tactic: Any


@dataclass(frozen=True)
class Sample:
    """One measured tactic at one nearest profile. `time_ms` is the mean over repeats and ranks,
    infinite where the tactic failed.
    """

    custom_op: str
    runner: str
    tactic: Any
    profile: Any
    time_ms: float
    error: str = ""


@dataclass(frozen=True)
class Question:
    """What one call of an op asked the AutoTuner: enough to run any of its tactics again and to write its entry.

    `config` is the op's TuningConfig with the plan's buckets in it, `inputs` are the caller's real tensors, `offered`
    the tactics of each runner, by its place. They are read while the question is asked: the two products of
    cutlass_fused_moe share one runner, which offers the tactics of whichever product was asked for last.
    """

    custom_op: str
    runners: tuple[Any, ...]
    config: Any
    inputs: list[Any]
    kwargs: Mapping[str, Any]
    lookup: Lookup
    offered: tuple[tuple[int, Any], ...] = ()


@dataclass
class Watch:
    """What was seen since it was last cleared."""

    lookups: list[Lookup] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    questions: list[Question] | None = None  # kept only while this is a list: they hold tensors
    looked_up: list[Attempt] = field(default_factory=list)  # entries of one call, which runs once all are looked up
    measured: int = 0  # never cleared

    def clear(self) -> None:
        """Forget lookups and samples."""
        self.lookups.clear()
        self.samples.clear()
        self.looked_up.clear()


def _bucket(profile: Theirs, config: Theirs) -> int:
    """The token count that a nearest profile stands for; 0 where nothing is dynamic."""
    for spec in config.dynamic_tensor_specs:
        return int(profile[spec.input_idx[0]][spec.dim_idx[0]])
    return 0


class ObservedTuner(_at.AutoTuner):  # type: ignore[misc, name-defined]
    """`on_try` is called with each tactic before it runs, and a text about it; `forbid` makes measuring an error.

    Tactics in `banned`, by identity, are never measured.
    """

    def __init__(
        self,
        knobs: Mapping[str, int],
        *,
        on_try: Callable[[Attempt | None, str], None] | None = None,
        forbid: bool = False,
    ) -> None:
        try:
            super().__init__(**knobs)
        except Exception as error:
            if not (named := os.environ.get(BLOCKLIST)):
                raise
            raise BlocklistUnreadable(
                f"FlashInfer cannot read {BLOCKLIST}={named}: {type(error).__name__}: {error}",
                hint=f"correct that file, or unset {BLOCKLIST}",
            ) from error
        self.watch = Watch()
        self.banned: frozenset[bytes] = frozenset()
        self._on_try = on_try
        self._forbid = forbid
        self._op = ""
        self._kwargs: Mapping[str, Any] = {}
        self._offered: tuple[tuple[int, Any], ...] = ()

    def running(self, attempt: Attempt, words: str = "") -> None:
        """Note the tactic that is run now, until `idle`."""
        if self._on_try is not None:
            self._on_try(attempt, words)

    def idle(self) -> None:
        """Note that no tactic is run any more."""
        if self._on_try is not None:
            self._on_try(None, "")

    def choose_one(self, custom_op: str, *args: Theirs, **kwargs: Theirs) -> Theirs:
        """Note which op is being chosen for. A replay must never be in tuning mode, whether or not it would measure."""
        hooks.at("looking_up", self)
        if self._forbid and self.is_tuning_mode:
            self.watch.measured += 1
            raise ReplayMeasured(f"{custom_op} was called in tuning mode")
        outer, self._op, self._kwargs = self._op, custom_op, kwargs
        runners = kwargs["runners"] if "runners" in kwargs else args[0]
        if self.watch.questions is not None:
            self._offered = flashinfer_api.offered(runners, kwargs["inputs"] if "inputs" in kwargs else args[2])
        try:
            with guarded(runners, custom_op) if self.is_tuning_mode else contextlib.nullcontext():
                return super().choose_one(custom_op, *args, **kwargs)
        finally:
            self._op = outer

    def search_cache(self, *args: Theirs, **kwargs: Theirs) -> Theirs:
        """Look up for real and note the answer."""
        found, question = self._look_up(*args, **kwargs)
        lookup = question.lookup
        self.watch.lookups.append(lookup)
        if not self.is_tuning_mode:
            bucket = _bucket(lookup.profile, question.config)
            entry = lookup.key if lookup.hit else ""
            attempt = Attempt(lookup.custom_op, lookup.runner, lookup.tactic, lookup.profile, bucket, entry)
            self.running(replace(attempt, also=[asdict(one) for one in self.watch.looked_up]))
            self.watch.looked_up.append(attempt)
        if self.watch.questions is not None and question.inputs:
            self.watch.questions.append(question)
        return found

    def ask_as_others(self, question: Question) -> Lookup:
        """What a caller gets who asks the same with inputs of other shapes (`pipeline.cache.otherkeys`).

        Only looked up, not run, and not noted. The inputs give no more than dtypes to the key here.
        """
        shapes = other_shapes(self._get_input_sizes(question.inputs))
        return self._look_up(question.custom_op, question.runners, shapes, question.config, question.inputs)[1].lookup

    def _look_up(
        self,
        custom_op: str,
        runners: Theirs,
        input_shapes: Theirs,
        tuning_config: Theirs,
        inputs: Theirs = None,
        **kwargs: Theirs,
    ) -> tuple[Theirs, Question]:
        """What the real `search_cache` returns, and what it was asked and answered."""
        found = super().search_cache(custom_op, runners, input_shapes, tuning_config, inputs, **kwargs)
        hit, runner_id, tactic, _ = found
        runner = runners[runner_id]
        extras = runner.get_cache_key_extras(inputs) if inputs is not None else ()
        key = self._get_cache_key(custom_op, runner, input_shapes, tuning_config, extras)
        lookup = Lookup(
            custom_op,
            bool(hit),
            key.file_key,
            key.nearest_profile,
            type(runner).__name__,
            flashinfer_api.tactic_json(tactic),
        )
        asked = (custom_op, tuple(runners), tuning_config, list(inputs or ()), self._kwargs, lookup, self._offered)
        return found, Question(*asked)

    def ask(self, call: Callable[[], object]) -> list[Question]:
        """What a call asks. The questions hold its tensors."""
        self.watch.clear()
        self.watch.questions = []
        try:
            call()
            return self.watch.questions
        finally:
            self.watch.questions = None
            self.idle()

    def _prepare_input_tensors(self, *args: Theirs, **kwargs: Theirs) -> Theirs:
        with preparing("drawing inputs", self._op):
            hooks.at("drawing_inputs")
            return super()._prepare_input_tensors(*args, **kwargs)

    def _prepare_input_tensors_with_batches(self, *args: Theirs, **kwargs: Theirs) -> Theirs:
        with preparing("copying inputs", self._op, any_error=True):
            hooks.at("copying_inputs")
            return super()._prepare_input_tensors_with_batches(*args, **kwargs)

    def _profile_single_kernel(
        self,
        runner: Theirs,
        inputs: Theirs,
        tactic: Theirs,
        tuning_config: Theirs,
        **kwargs: Theirs,
    ) -> Theirs:
        self.watch.measured += 1
        shapes = self._get_input_sizes(inputs)
        name = type(runner).__name__
        if self._forbid:
            raise ReplayMeasured(f"{self._op} {shapes}: {name} {tactic} was measured")
        profile = self._find_nearest_profile(shapes, tuning_config)
        tried = flashinfer_api.tactic_json(tactic)

        def note(time_ms: float, error: str = "") -> None:
            self.watch.samples.append(Sample(self._op, name, tried, profile, time_ms, error))

        attempt = Attempt(self._op, name, tried, profile, _bucket(profile, tuning_config))
        if self.banned and attempt.identity in self.banned:
            note(float("inf"), "it ended a rank before")
            raise TacticCrashed(f"{name} tactic {tactic} ended a rank before")
        self.running(attempt, f"{self._op} {shapes[0]}, {name} tactic {tactic}")
        try:
            time_ms = super()._profile_single_kernel(runner, inputs, tactic, tuning_config, **kwargs)
            time_ms = hooks.changed("measured", time_ms, tactic)
        except BaseException as error:
            note(float("inf"), f"{type(error).__name__}: {error}")
            if isinstance(error, OUT_OF_MEMORY):  # without a group FlashInfer would give the whole op up
                with contextlib.suppress(Exception):
                    torch.cuda.empty_cache()
                self.idle()
                raise TacticOutOfMemory(str(error)) from error
            survive(error)
            self.idle()
            raise
        self.idle()
        note(float(time_ms))
        return time_ms
