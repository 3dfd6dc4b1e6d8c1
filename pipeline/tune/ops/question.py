"""What an op asks the AutoTuner, found by calling it with a tuner that only listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from pipeline.tune import flashinfer_api

_at = flashinfer_api.load()


class _Callable(Protocol):
    def call(self, tokens: int) -> torch.Tensor: ...


class _Heard(BaseException):
    """The question was heard; the call need not go on. No `Exception`, which an op might take for its own."""


def offered(case: _Callable, tokens: int) -> Mapping[str, list[Any]]:
    """The tactics that each runner of an op offers at a token count, as JSON values. Nothing runs on the device.

    An op with several questions tells those of its first; the others follow from the same tensors.
    """
    tuner, found = _at.AutoTuner.get(), {}

    def listen(_op: str, runners: list[Any], _config: Any, inputs: list[Any], **_: Any) -> Any:  # noqa: ANN401
        for runner in runners:
            tactics = runner.get_valid_tactics(inputs, None)
            found[type(runner).__name__] = [flashinfer_api.tactic_json(tactic) for tactic in tactics]
        raise _Heard

    tuner.choose_one = listen
    try:
        case.call(tokens)
    except _Heard:
        pass
    finally:
        del tuner.choose_one
    return found
