"""Small trees for the tests of versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLASHINFER = {
    "packages": ["flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"],
    "repositories": ["flashinfer"],
    "git_ref": "v{}",
}
CUDA = {"packages": [], "images": ["nvidia/cuda"], "repositories": ["cuda"], "local_label": "cu{major}{minor}"}


def source(
    values: Mapping[str, str], relations: Mapping[str, Any] | None = None, closures: Mapping[str, Any] | None = None
) -> str:
    whole: dict[str, Any] = {"variable": {name: {"default": value} for name, value in values.items()}}
    if relations is not None:
        whole["relations"] = relations
    if closures is not None:
        whole["closures"] = closures
    return json.dumps(whole, indent=2) + "\n"


def plant(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for path, content in files.items():
        full = root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def texts(findings: Any) -> list[str]:
    return [finding.text() for finding in findings]
