"""What must be installed before ranks are started: said in one line, where an import would end in a traceback."""

from __future__ import annotations

import importlib.util
import sys

from pipeline.contract.errors import UsageError


class TorchMissing(UsageError):
    """This Python has no torch."""


def need_torch(instead: str) -> None:
    """Raise `TorchMissing` where this Python has no torch; `instead` is what to type on a host."""
    if importlib.util.find_spec("torch") is None:
        raise TorchMissing(
            f"{sys.executable} has no torch",
            hint=f"this runs where torch and FlashInfer are, as in the image; on a host type `{instead}`",
        )
