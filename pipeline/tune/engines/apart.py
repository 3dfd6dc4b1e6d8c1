"""This environment's record, read by a process that ends: our own would keep memory of a GPU that the engine needs."""

from __future__ import annotations

import json
import sys

from pipeline import run
from pipeline.contract.errors import WarmUpError
from pipeline.contract.record import Record

_SECONDS = 600.0  # torch and FlashInfer are imported in seconds, on a busy machine in minutes


class RecordUnread(WarmUpError):
    """torch and FlashInfer do not say what this environment is; what they said is among the details."""


def record_apart() -> Record:
    """Read the record. Raises `RecordUnread`, or `RecordInvalid` for what is none."""
    try:
        done = run.run([sys.executable, "-m", "pipeline.tune.record"], capture=True, timeout=_SECONDS)
        told = json.loads(done.stdout.strip().splitlines()[-1])["record"]
    except run.ProcessFailed as error:
        raise RecordUnread(
            f"the record of this environment cannot be read: {error.message}",
            details=error.details,
            hint="the image must carry torch and FlashInfer, and see the GPU that it plans for",
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise RecordUnread(f"the record of this environment cannot be read: {error!r}") from error
    return Record.from_json(told)
