"""Which CUDA libraries a process of this image loads: `python -m pipeline.tune.libraries` prints them as JSON.

    {"image_half": {…}, "libraries": {"libcublas.so.13": "/opt/…/libcublas.so.13 (540123456 bytes)", …}}

FlashInfer's numbers of tactics are places in lists that cuBLAS and cuDNN make, so the image that tuned and the image
that serves must load the same ones. Needs no GPU: torch loads its libraries without a driver.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

# From /proc/self/maps (proc(5)): the path is the last field of a line.
_MAPPED = re.compile(r"\s(/\S*/(lib(?:cu|nvrtc|nccl)\w*\.so[\d.]*))$", re.MULTILINE)
_DRIVER = re.compile(r"libcuda(debugger)?\.so")  # the host's, not the image's


def mapped(maps: str) -> dict[str, Path]:
    """Name to path of the CUDA libraries in the text of /proc/self/maps; the driver's own is left out."""
    return {name: Path(path) for path, name in _MAPPED.findall(maps) if not _DRIVER.match(name)}


def main() -> int:
    """Load torch, cuDNN's frontend where there is one, and FlashInfer; print what came with them."""
    from . import flashinfer_api

    flashinfer_api.load()
    half = {name: value for name, value in flashinfer_api.metadata().items() if name != "gpu"}
    found = mapped(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    libraries = {name: f"{path} ({path.stat().st_size} bytes)" for name, path in sorted(found.items())}
    sys.stdout.write(json.dumps({"image_half": half, "libraries": libraries}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
