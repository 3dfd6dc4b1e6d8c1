"""Remedies for what GPU processes die of, recognised in what they print. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeline.contract.places import ENV_WORKSPACE

# NCCL (src/misc/shmutils.cc) and torch's loaders name /dev/shm or a shared memory segment; CUDA's and torch's own
# words are those of cudaGetErrorString.
_CAUSES = (
    (
        re.compile(r"(?i)(/dev/shm|shared memory)[^\n]*(no space|error|fail|insufficient|bus error)|"
                   r"(no space left|bus error|error while creating|failed to (extend|open|create))[^\n]*"
                   r"(/dev/shm|shared memory)"),
        "shared memory is too small for NCCL: a container needs --shm-size=1g or more, or --ipc=host",
    ),
    (
        re.compile(r"(?i)no space left on device|disk quota exceeded"),
        f"free room on that disk; {ENV_WORKSPACE} moves what ranks write, and what they compile",
    ),
    (
        re.compile(r"(?i)out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        "out of GPU memory: end what else uses the GPU (REQUIRE_IDLE=1 refuses a busy one), or plan with a smaller "
        "--max-tokens; an engine takes a smaller share of memory by its own option",
    ),
    (
        re.compile(r"(?i)driver version is insufficient|provided PTX was compiled with an unsupported toolchain"),
        "the driver is older than the image's CUDA: update it, or choose a base made for an older CUDA",
    ),
)  # fmt: skip


def remedy(said: Iterable[str], otherwise: str) -> str:
    """The remedy for the first known cause in these lines; `otherwise` where there is none."""
    text = "\n".join(said)
    return next((hint for pattern, hint in _CAUSES if pattern.search(text)), otherwise)
