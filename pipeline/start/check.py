"""What a start finds out: the key that fits this host, the seconds it took, and what to export."""

# Importing pathlib takes longer than all that this module does.
# ruff: noqa: PTH123
from __future__ import annotations

import os
import time
from collections.abc import Mapping

from pipeline.cache.pick import Baked, HostInfo, choose, keys_below, read_baked
from pipeline.contract.places import CACHE_ROOT, ENV_CACHE_DIR, ENV_KEY


class Found:
    """The outcome of a check. `chosen` is None where nothing fits, and then `why` says so in one line."""

    __slots__ = ("chosen", "nvml_seconds", "root", "seconds", "why")

    def __init__(self, root: str, chosen: Baked | None, why: str, seconds: float, nvml_seconds: float) -> None:
        self.root = root
        self.chosen = chosen
        self.why = why
        self.seconds = seconds
        self.nvml_seconds = nvml_seconds

    def line(self) -> str:
        """The one line that a start prints, without control characters, whatever a manifest holds."""
        took = f"{self.seconds * 1000:.0f} ms"
        if self.nvml_seconds:
            took += f", NVML {self.nvml_seconds * 1000:.0f} ms"
        said = self.why and f"not used: {self.why}"
        if self.chosen is not None:
            said = f"{self.chosen.entries} entries for {self.chosen.device}"
        return "".join(c if c.isprintable() else "?" for c in f"tuned cache: {said[:300]} ({took})")


def check(environment: Mapping[str, str]) -> Found:
    """Compare the baked keys with this host's half of the record; never raises for what lies on the disk."""
    began = time.perf_counter()
    root = environment.get(ENV_CACHE_DIR) or CACHE_ROOT
    baked = [read_baked(root, key) for key in keys_below(root)]
    here, nvml_seconds, silent = here_half(baked, environment)
    chosen, why = choose(baked, here, environment.get(ENV_KEY, ""))
    if silent and chosen is None:
        why += f" ({silent})"
    return Found(root, chosen, why, time.perf_counter() - began - nvml_seconds, nvml_seconds)


def here_half(baked: list[Baked], environment: Mapping[str, str]) -> tuple[HostInfo, float, str]:
    """This host's half as far as the keys ask for it, the seconds that NVML took, and why NVML is silent."""
    cpu = read_cpu() if any(one.cpu for one in baked) else {}
    if all(one.cpu or one.broken for one in baked):
        return HostInfo(cpu=cpu), 0.0, ""
    from .nvml import NoNvml, read_gpus, visible

    began = time.perf_counter()
    try:
        gpus = read_gpus()
    except NoNvml as error:
        return HostInfo(cpu=cpu), time.perf_counter() - began, str(error)
    seconds = time.perf_counter() - began
    return HostInfo(tuple(device.name for device in visible(gpus, environment)), cpu), seconds, ""


def read_cpu() -> dict[str, str]:
    """This processor's facts as the tuner records them; without what cannot be read."""
    from pipeline.contract.processor import CPUINFO, parse_cpuinfo

    try:
        with open(CPUINFO, encoding="utf-8", errors="replace") as stream:
            text = stream.read(64 * 1024)
    except OSError:
        return {}
    return {**parse_cpuinfo(text), "threads": str(len(os.sched_getaffinity(0)))}
