"""The environment record: FlashInfer's own metadata, its name for the architecture, and the host half.

python -m pipeline.tune.record        prints {"record": …} as JSON
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import PipelineError
from pipeline.contract.exits import Exit
from pipeline.contract.record import Host, Record, RecordInvalid

_PACKAGES = ("torch", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "apache-tvm-ffi",
             "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "numpy")  # fmt: skip


def read_record(device: str, *, gpus: Sequence[str] = ()) -> Record:
    """Read the record of this process. `device` is `cpu` or `cuda`; `gpus` names one GPU per rank, in rank order.

    Imports torch and FlashInfer. Raises `RecordInvalid` where FlashInfer names no architecture for its GPUs.
    """
    from . import flashinfer_api

    flashinfer_api.load()
    if device == "cpu":
        arch, host = f"cpu-{platform.machine()}", Host(cpu=cpu_facts())
    else:
        arch, host = flashinfer_api.arch(), Host(gpus=tuple(gpus) or _visible_gpus(), driver=_driver())
    record = Record(flashinfer=flashinfer_api.metadata(), arch=arch, host=host, packages=_versions())
    record.key_inputs()  # refuses an empty arch
    if device == "cuda" and record.flashinfer.get("gpu", "unknown") == "unknown":
        raise RecordInvalid("FlashInfer cannot name the GPU", hint="run where the GPUs are visible, with their driver")
    return record


def cpu_facts() -> dict[str, str]:
    """Model, sha256 of the sorted flags, and how many processors one rank may use."""
    from .ops.cpu_mm import cpu_threads

    model, flags = _cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    return {
        "model": model or platform.processor() or platform.machine(),
        "flags": sha256_bytes(" ".join(sorted(flags)).encode()),
        "threads": str(cpu_threads()),
    }


def _cpuinfo(text: str) -> tuple[str, set[str]]:
    """Model and flags of the first processor; Arm has numbers in place of a name."""
    first = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text.partition("\n\n")[0], re.MULTILINE))
    parts = [f"{name} {first[name]}" for name in ("CPU implementer", "CPU part", "CPU variant") if name in first]
    return first.get("model name", ", ".join(parts)), set((first.get("flags") or first.get("Features") or "").split())


def _visible_gpus() -> tuple[str, ...]:
    import torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _driver() -> str:
    """The driver's version, which the kernel module states."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            continue
    return found


def differences(tuned: Record, here: Record) -> list[dict[str, Any]]:
    """Every field that the key covers and that is not the same here."""
    was, now = tuned.key_inputs(), here.key_inputs()
    found = [{"field": "arch", "tuned": was["arch"], "here": now["arch"]}] if was["arch"] != now["arch"] else []
    for part in ("flashinfer", "cpu"):
        found += [
            {"field": f"{part}.{name}", "tuned": was[part].get(name), "here": now[part].get(name)}
            for name in sorted({*was[part], *now[part]})
            if was[part].get(name) != now[part].get(name)
        ]
    return found


def main() -> int:
    """Print the record of this machine."""
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(json.dumps({"record": read_record(device).to_json()}))  # noqa: T201 - data
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
