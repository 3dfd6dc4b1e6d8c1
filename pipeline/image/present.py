"""Whether the device that a key was tuned on is here, so that the key can be replayed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from pipeline.contract.manifest import Manifest


def is_present(manifest: Manifest, *, processor: Mapping[str, Any], gpus: tuple[str, ...], machine: str = "") -> bool:
    """`processor` as `device.processor` reads it; `gpus`: names of the GPUs that the engine gives a container."""
    if manifest.key.split("/")[1].startswith("cpu-"):
        same = {name: str(processor.get(name, "")) for name in ("model", "flags")}
        cpu = manifest.record.host.cpu
        arch = f"cpu-{machine or platform.machine()}"
        return manifest.record.arch == arch and all(cpu.get(name, "") == value for name, value in same.items())
    wanted = manifest.record.host.gpus
    return len(gpus) >= len(wanted) and set(wanted) <= set(gpus)
