"""Reading plan.json in the image."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Plan


class PlanUnreadable(UsageError):
    """plan.json cannot be read."""


def read_plan(path: Path) -> Plan:
    """Read a plan; raise `PlanUnreadable` or `PlanInvalid`."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanUnreadable(f"{path} cannot be read: {error.strerror}", hint="make it with `pipeline plan`") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested too deep
        raise PlanUnreadable(f"{path} is not JSON: {error}", hint="make it with `pipeline plan`") from error
    return Plan.from_json(value)
