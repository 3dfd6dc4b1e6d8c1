"""Small trees for the tests of versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLASHINFER = {
    "packages": ["flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"],
    "repositories": ["flashinfer"],
}
CUDA = {
    "packages": ["cuda-toolkit"],
    "images": ["nvidia/cuda"],
    "repositories": ["cuda"],
    "labels": ["cu{major}{minor}"],
}
TORCH = {"packages": ["torch"], "images": ["pytorch/pytorch"], "repositories": ["pytorch"]}


def source(values: Mapping[str, str], governs: Mapping[str, Any] | None = None, **more: Any) -> str:
    whole: dict[str, Any] = {"variable": {name: {"default": value} for name, value in values.items()}}
    if governs is not None:
        whole["governs"] = governs
    return json.dumps({**whole, **more}, indent=2) + "\n"


def plant(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for path, content in files.items():
        full = root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def texts(findings: Any) -> list[str]:
    return [finding.text() for finding in findings]
