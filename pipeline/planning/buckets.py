"""The token counts at which an op is tuned.

FlashInfer's GEMM and MoE ops generate their own buckets from the largest token count and round a real count *up* to
one of them (flashinfer/fused_moe/utils.py, the same in 0.6.16.post3 and 0.7.4): powers of two to 256, steps of 256
to 2048, steps of 512 to 4096, powers of two above. A server that runs without `autotune(tuning_buckets=…)` finds
only these.
"""

from __future__ import annotations

from collections.abc import Sequence

CPU_MAX_TOKENS = 128
CUDA_MAX_TOKENS = 8192
LARGEST = 1 << 20  # no server batches a million tokens; a slip of the finger does


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4 … up to the first power of two that holds `largest` tokens."""
    return tuple(1 << i for i in range((largest - 1).bit_length() + 1))


def flashinfer_buckets(largest: int) -> tuple[int, ...]:
    """FlashInfer's default buckets up to the first that holds `largest` tokens.

    Where `largest` is no bucket itself FlashInfer would tune it as an extra point, which its default rounding never
    maps to; so the next real bucket ends the list instead.
    """
    grid = [*powers_of_two(256), *range(512, 2049, 256), *range(2560, 4097, 512)]
    while grid[-1] < largest:
        grid.append(grid[-1] * 2)
    return tuple(b for i, b in enumerate(grid) if i == 0 or grid[i - 1] < largest)


def default_buckets(device: str, max_tokens: int | None) -> tuple[int, ...]:
    """The buckets of a plan that names none."""
    if device == "cpu":
        return powers_of_two(max_tokens or CPU_MAX_TOKENS)
    return flashinfer_buckets(max_tokens or CUDA_MAX_TOKENS)


def own_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Buckets that the user named: ascending, without repeats."""
    return tuple(sorted(set(buckets)))
