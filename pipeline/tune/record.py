"""The environment record: FlashInfer's own metadata, its name for the architecture, and the host half.

python -m pipeline.tune.record                  prints {"record": …} as JSON
python -m pipeline.tune.record --image-half     prints {"image_half": …, "libraries": …, "sizes": …}; needs no GPU
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
from pipeline.contract.errors import Exit, PipelineError
from pipeline.contract.processor import CPUINFO, parse_cpuinfo
from pipeline.contract.record import Host, Record, RecordInvalid

_PACKAGES = ("torch", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "apache-tvm-ffi",
             "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "numpy")  # fmt: skip

_LIBRARY = re.compile(r"lib(cublas\w*|cudnn\w*|cudart|nvrtc[\w-]*|nccl|torch\w*|c10\w*)[.-]")


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
    flashinfer = flashinfer_api.metadata()
    record = Record(flashinfer, arch, host, _versions(), loaded_libraries())
    record.key_inputs()  # refuses an empty arch
    if device == "cuda" and record.flashinfer.get("gpu", "unknown") == "unknown":
        raise RecordInvalid("FlashInfer cannot name the GPU", hint="run where the GPUs are visible, with their driver")
    return record


def cpu_facts() -> dict[str, str]:
    """Model, sha256 of the sorted flags, and how many processors one rank may use."""
    from .ops.cpu_mm import cpu_threads

    found = parse_cpuinfo(Path(CPUINFO).read_text(encoding="utf-8", errors="replace"))
    return {
        "model": found.get("model") or platform.processor() or platform.machine(),
        "flags": found.get("flags") or sha256_bytes(b""),
        "threads": str(cpu_threads()),
    }


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


def loaded_libraries() -> dict[str, str]:
    """File name to path of those shared libraries of this process that decide the image half of a record.

    FlashInfer asks the libcublas that the loader finds for its version, so that it is among them.
    """
    found: dict[str, str] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        name = path.rpartition("/")[2]
        if path and _LIBRARY.match(name):
            found[name] = f"/{path}"
    return dict(sorted(found.items()))


def image_half() -> dict[str, Any]:
    """What an image decides of a record, and the libraries behind it with their bytes.

    Needs no GPU: what only a GPU tells is `unknown`.
    """
    from . import flashinfer_api

    flashinfer_api.load()
    flashinfer = {name: value for name, value in flashinfer_api.metadata().items() if name != "gpu"}
    libraries = loaded_libraries()
    sizes = {name: f"{Path(path).stat().st_size} bytes" for name, path in libraries.items()}
    return {"image_half": flashinfer, "libraries": libraries, "sizes": sizes}


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
    if tuned.image_half() != here.image_half():
        found += [
            {"field": f"library {name}", "tuned": path, "here": here.libraries[name]}
            for name, path in tuned.libraries.items()
            if here.libraries.get(name, path) != path
        ]
    return found


def main(words: Sequence[str] = ()) -> int:
    """Print the record of this machine, or with --image-half what the image decides of it."""
    try:
        if "--image-half" in words:
            print(json.dumps(image_half()))  # noqa: T201 - data
            return int(Exit.OK)
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(json.dumps({"record": read_record(device).to_json()}))  # noqa: T201 - data
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
