"""CDI devices by their spec files, for engines before API 1.50, which do not list them.

A spec file (JSON or YAML, directly in /etc/cdi or /var/run/cdi) has a `kind` (`nvidia.com/gpu`) and named
`devices`; a device is asked for as `kind=name`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _load(file: Path) -> Any:  # noqa: ANN401 - any document may lie there; the caller looks
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def devices_in(folders: Sequence[str]) -> tuple[str, ...]:
    """The devices that the spec files in `folders` name, sorted; a file that is no spec is skipped, as engines do."""
    found: set[str] = set()
    for file in (f for folder in folders for f in Path(folder).glob("*") if f.suffix in {".json", ".yaml", ".yml"}):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            spec = _load(file)
            found.update(f"{spec['kind']}={device['name']}" for device in spec["devices"])
    return tuple(sorted(found))
