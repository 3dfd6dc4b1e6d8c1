"""From which FlashInfer on keys of a cache file say enough, and not too much: for who plans and for who tunes.

Read in the published packages that `pipeline.planning.abilities` names, where it is told what the older ones write.
"""

from __future__ import annotations

import re

BF16_MENDED = "0.7.4"  # keys of `mm_bf16` without the workspace's size, nor cuBLASLt's with the real token count
MOE_KEY_TOLD_APART = "0.6.18"  # `cutlass_fused_moe`: layers of equal shapes
MOE_KEY_WITHOUT_RANK = "0.7.2"  # and no rank in the key again
TRTLLM_KEY_TOLD_APART = "0.7.0"  # the trtllm-gen MoE ops: layers of equal inputs and outputs, layouts of the weights


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: `0.6.16.post3` is (0, 6, 16)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
