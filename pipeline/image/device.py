"""The device that the ranks will time: part of the inputs digest, so that no other device's cache is taken for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import DockerError

from .contain import Sandbox, run_to_end

if TYPE_CHECKING:
    from docker import DockerClient

_READ = "print(open('/proc/cpuinfo').read())"


class DeviceUnknown(DockerError):
    """The engine's processor cannot be read."""


def processor(cpuinfo: str) -> dict[str, Any]:
    """Model name, sha256 of the sorted flags, and the number of logical processors, from /proc/cpuinfo."""
    model = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if model is None or flags is None:
        raise DeviceUnknown("/proc/cpuinfo does not name the processor", hint="tune where it does, or import a cache")
    words = " ".join(sorted(flags.group(1).split()))
    count = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE))
    return {"model": model.group(1).strip(), "flags": sha256_bytes(words.encode()), "count": count}


def read_processor(client: DockerClient, base: str, *, local: bool) -> dict[str, Any]:
    """The processor of the engine's host: read here when the engine is local, else by a container of `base`."""
    if local:
        return processor(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return processor(run_to_end(client, base, ["python3", "-c", _READ], Sandbox(), max_wait=120.0).stdout)
