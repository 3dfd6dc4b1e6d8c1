"""What changed between FlashInfer's versions in the cache files that they write and read.

Read in the published packages 0.6.16.post3, 0.6.17, 0.6.18, 0.6.18.post1, 0.7.0, 0.7.1, 0.7.2, 0.7.2.post1 and 0.7.4
(there is no 0.7.3 among them). `docs/reference/models.md` shows this table; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NEWEST_READ = "0.7.4"
OLDEST = "0.6.16"
UPGRADE = f"use FlashInfer {OLDEST} or newer"

_VERSION = re.compile(
    r"v?(\d+(?:\.\d+)*)([-_.]?(?:a|alpha|b|beta|c|rc|pre|preview|dev)[-_.]?\d*)?"
    r"(?:[-_.]?(?:post|rev|r)[-_.]?(\d*)|-(\d+))?(?:[-_.]?dev[-_.]?\d*)?(?:\+[a-z0-9._-]+)?",
    re.IGNORECASE | re.ASCII,
)
_LONGEST = 64  # characters of a version


def is_version(text: str) -> bool:
    """Whether a text is a version as PEP 440 writes them."""
    return len(text) <= _LONGEST and _VERSION.fullmatch(text.strip()) is not None


def order(version: str) -> tuple[tuple[int, ...], int]:
    """A sort key for versions: 0.7.2rc1 < 0.7.2 < 0.7.2.post1; a local part (`+cu130`) does not count.

    What is no version sorts below all of them. What comes before a release (`rc1`, `dev5`) is one step below it.
    """
    found = _VERSION.fullmatch(version.strip()) if is_version(version) else None
    if found is None:
        return (), 0
    release = tuple(int(part) for part in found[1].split("."))
    while release and release[-1] == 0:
        release = release[:-1]
    if found[2]:
        return release, -1
    return release, 0 if found[3] is None and found[4] is None else 1 + int(found[3] or found[4] or 0)


@dataclass(frozen=True)
class Feature:
    """A property that FlashInfer has from version `since` on, and before version `until` where that is given."""

    what: str
    since: str
    until: str = ""

    def of(self, version: str) -> bool:
        """Whether this version has it. A version newer than `NEWEST_READ` is taken to be as that one."""
        return order(self.since) <= order(version) and not (self.until and order(version) >= order(self.until))


PROCESS_GROUP = Feature("the autotuner has a process group, so that ranks can choose alike", OLDEST)
KEYS_HOLD_SHAPES = Feature("cache keys tell the shapes of one op apart", "0.6.13")
BF16_ANY_COUNT = Feature("a cuBLASLt entry of `mm_bf16` answers every token count of its bucket", "0.7.4")
BF16_CUDNN_FOUND = Feature("a cuDNN entry of `mm_bf16` is found again", "0.7.4")
MOE_LAYERS_APART = Feature("keys of `cutlass_fused_moe` tell layers of equal shapes apart", "0.6.18")
MOE_RANK_IN_KEY = Feature("keys of `cutlass_fused_moe` contain the rank", "0.6.18", until="0.7.2")
MOE_FUSED_IN_KEY = Feature("keys of `cutlass_fused_moe` contain whether the last step is fused", "0.6.18")
TRTLLM_ROUTED_FP8 = Feature("it has `trtllm_fp8_per_tensor_scale_routed_moe`", "0.6.17")
TRTLLM_LAYERS_APART = Feature("keys of trtllm-gen MoE ops contain intermediate size, local experts, layout", "0.7.0")
# True of all versions read: `cutlass_fused_moe` with fp8 block scales returns from profiling without running a kernel
# (with mxfp4 weights it runs them).

TABLE = (
    PROCESS_GROUP,
    BF16_ANY_COUNT,
    BF16_CUDNN_FOUND,
    MOE_LAYERS_APART,
    MOE_RANK_IN_KEY,
    MOE_FUSED_IN_KEY,
    TRTLLM_ROUTED_FP8,
    TRTLLM_LAYERS_APART,
)


def is_newer_than_read(version: str) -> bool:
    """Whether a version is newer than the newest whose code was read."""
    return order(version) > order(NEWEST_READ)


def too_old(version: str) -> str:
    """Why this version cannot be tuned with, in one line; empty where it can."""
    if PROCESS_GROUP.of(version):
        return ""
    why = "it has no process group for the autotuner, so ranks would choose differently"
    if not KEYS_HOLD_SHAPES.of(version):
        why += "; and its cache keys collide, so that a tactic can be chosen that crashes another shape"
    return f"FlashInfer {version} is refused: {why}"
