"""What the pinned FlashInfer can write to a cache file and find again, by version.

Read in the published packages 0.6.16.post3, 0.6.17, 0.6.18, 0.6.18.post1, 0.7.0, 0.7.1, 0.7.2, 0.7.2.post1 and 0.7.4:

- the cuBLASLt runner of `mm_bf16` puts the real token count into the key, so that an entry answers only a call with
  exactly a tuned count; and the workspace's size is part of every `bf16_gemm` key, which cuDNN resizes while it is
  tuned, so that its entries are lost. Both up to 0.7.2.post1, neither in 0.7.4.
- `cutlass_fused_moe` writes only tensor shapes into the key up to 0.6.17: layers that differ in dtype, top_k or
  parallel sizes collide and the last one wins. From 0.6.18 to 0.7.1 the key also holds the rank; from 0.7.2 all but
  the rank.
- the trtllm-gen MoE ops write only the shapes of inputs and output into the key up to 0.6.18.post1: not the layout of
  the weights, which the key holds from 0.7.0 on.
- `cutlass_fused_moe` with fp8 block scales returns from profiling without running anything, in all of them; with mxfp4
  weights it runs the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.contract.mended import BF16_MENDED, MOE_KEY_TOLD_APART, MOE_KEY_WITHOUT_RANK, TRTLLM_KEY_TOLD_APART
from pipeline.contract.oldest import REMEDY, too_old

from .problems import Problems

NEWEST_READ = "0.7.4"


@dataclass(frozen=True)
class Abilities:
    """True is sound. `exact_only`: tuned `mm_bf16` entries answer exact token counts alone."""

    exact_only: bool
    cudnn_bf16_found_again: bool
    moe_keys_hold_rank: bool
    trtllm_keys_hold_layout: bool


def is_unread(version: str) -> bool:
    """Whether a version, one that `abilities` took, is newer than what was read."""
    from packaging.version import Version

    return Version(version) > Version(NEWEST_READ)


def abilities(version: str, problems: Problems) -> Abilities:
    """The abilities of one FlashInfer version; one that cannot be read, or is refused by the tuner, is a problem."""
    from packaging.version import InvalidVersion, Version

    try:
        pinned = Version(version)
    except InvalidVersion:
        problems.add(f"FlashInfer version {version!r} is not a version", "write it as in 0.6.16.post3")
        return Abilities(True, False, False, False)
    if refusal := too_old(version, pinned.release):  # the ranks would say so, after all has been built
        problems.add(refusal, REMEDY)
    mended = pinned >= Version(BF16_MENDED)
    apart = pinned >= Version(MOE_KEY_TOLD_APART)
    return Abilities(
        exact_only=not mended,
        cudnn_bf16_found_again=mended,
        moe_keys_hold_rank=apart and pinned < Version(MOE_KEY_WITHOUT_RANK),
        trtllm_keys_hold_layout=pinned >= Version(TRTLLM_KEY_TOLD_APART),
    )
