"""Failures between two meetings of the ranks, where FlashInfer would go on alone.

In synchronized tuning the ranks meet once per tactic. FlashInfer 0.6 answers an exhausted memory outside of a tactic
with the default for the whole op, and takes any error in the copying of inputs for a bad tactic: that rank stays away
from the meetings that it owes, and the others wait. 0.7 agrees on a common fallback, and the result is partial. Here
the rank stops at once and says why; the supervisor ends the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pipeline.contract.errors import WarmUpError

from . import flashinfer_api, hooks
from .failures import DeviceLost

_at = flashinfer_api.load()

OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)
# What FlashInfer asks of a runner before it times its tactics.
_BEFORE_TIMING = {"get_valid_tactics": "list its tactics", "precompile_tactics": "compile its tactics"}


class OutOfMemory(WarmUpError):
    """A rank ran out of memory outside of a tactic."""


class TacticOutOfMemory(RuntimeError):
    """A tactic ran out of memory: it is out of the race, the op is not."""


class TacticCrashed(RuntimeError):
    """A tactic that ended a rank in an earlier try: it is out of the race on all ranks."""


class Unprepared(BaseException):
    """A rank cannot go on; `error` says why. No `Exception`, since FlashInfer would handle it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def context_lost() -> str:
    """Why nothing runs on this process's GPU any more, or nothing.

    A failed kernel leaves an error behind that can be taken back; after an illegal access none can.
    """
    if not torch.cuda.is_initialized():
        return hooks.changed("context_lost", "")
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaGetLastError()
    try:
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except OUT_OF_MEMORY:  # a context that is lost has another answer to every call
        return ""
    except Exception as error:  # noqa: BLE001 - CUDA raises anything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return ""


def survive(error: BaseException) -> None:
    """After a tactic failed: raise `DeviceLost` where it took the GPU's context with it."""
    lost = context_lost()
    if lost:
        raise DeviceLost(lost) from error


@contextlib.contextmanager
def preparing(what: str, op: str, *, any_error: bool = False) -> Iterator[None]:
    """Turn an exhausted memory, or with `any_error` any error, into `Unprepared`."""
    try:
        yield
    except OUT_OF_MEMORY as error:
        found = OutOfMemory(
            f"out of memory while {what} for {op}",
            details=[f"{type(error).__name__}: {error}"],
            hint="nothing was saved; free memory, plan with a smaller --max-tokens, or leave the op out (--skip-ops)",
        )
        raise Unprepared(found) from error
    except Exception as error:
        if not any_error:
            raise
        raise Unprepared(error) from error


@contextlib.contextmanager
def stops_rank() -> Iterator[None]:
    """Outside of FlashInfer: raise what an `Unprepared` carries."""
    try:
        yield
    except Unprepared as stop:
        raise stop.error from stop.__cause__


@contextlib.contextmanager
def guarded(runners: Sequence[Any], op: str) -> Iterator[None]:
    """Watch over what FlashInfer asks of `runners` before it times them.

    Their classes are changed and put back, not the runners: an attribute of a runner would change its identity.
    """
    saved: list[tuple[type, str, Any]] = []

    def put(owner: type, name: str, made: Callable[..., Any]) -> None:
        saved.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, made)

    call = _at.TunableRunner.__call__

    def prepare(self: object, inputs: object, **kwargs: Any) -> Any:  # noqa: ANN401 - FlashInfer's
        if not kwargs.get("do_preparation"):
            hooks.at("before_tactic", inputs, kwargs.get("tactic"))
            return call(self, inputs, **kwargs)
        with preparing(f"preparing {type(self).__name__}", op):
            hooks.at("preparing", type(self).__name__)
            return call(self, inputs, **kwargs)

    put(_at.TunableRunner, "__call__", prepare)
    for owner in dict.fromkeys(type(runner) for runner in runners):
        for name, words in _BEFORE_TIMING.items():
            if hasattr(owner, name):
                put(owner, name, _watched(getattr(owner, name), f"asking {owner.__name__} to {words}", op))
    try:
        yield
    finally:
        for owner, name, value in reversed(saved):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _watched(real: Callable[..., Any], what: str, op: str) -> Callable[..., Any]:
    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - FlashInfer's
        with preparing(what, op):
            return real(*args, **kwargs)

    return watched
