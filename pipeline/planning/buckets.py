"""The token counts at which an op is tuned.

FlashInfer's GEMM and MoE ops generate their own buckets from the largest token count and round a real count *up* to
one of them (flashinfer/fused_moe/utils.py, the same in 0.6.16.post3 and 0.7.4): powers of two to 256, steps of 256
to 2048, steps of 512 to 4096, powers of two above. A server that runs without `autotune(tuning_buckets=…)` finds
only these.

A user names others as counts and ranges: `1,2,4,8-256:8,272-512:16` are the 51 sizes that vLLM captures as CUDA graphs
where 512 tokens are the most (vllm/config/vllm.py, `_set_cudagraph_sizes`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.contract.text import shown

from .problems import Problems

CPU_MAX_TOKENS = 128
CUDA_MAX_TOKENS = 8192
LARGEST = 1 << 20  # no server batches a million tokens; a slip of the finger does
MOST = 4096  # buckets of one plan: each is tuned for every op
_HOW = f"it takes counts from 1 to {LARGEST} and ranges first-last:step, such as 1,2,4,8-256:8"


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


def read_buckets(text: str, problems: Problems, option: str = "--buckets") -> tuple[int, ...]:
    """Counts (`8`) and ranges (`8-256:8`: first-last:step, both ends among them), ascending, without repeats.

    `problems` gets all that is wrong, as settings of `option`; the counts that are right are returned. A range whose
    last count no step reaches is wrong: a server captures that count, or another one was meant. So are more than `MOST`
    counts, which are never expanded.
    """
    named = [_counts(word, problems, option) for word in re.split(r"[,\s]+", text) if word]
    if (total := sum(map(len, named))) > MOST:
        problems.add(f"{option} names {total} token counts, {MOST} are the most", "name those that the server runs")
        return ()
    return tuple(sorted({count for counts in named for count in counts}))


def _counts(word: str, problems: Problems, option: str) -> Sequence[int]:
    """The counts that one word names; nothing where it is wrong."""
    named = f"{option}={shown(word, 60)}"
    found = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}):([0-9]{1,7}))?", word, re.ASCII)
    first, last, step = (int(found[1]), int(found[2] or found[1]), int(found[3] or 1)) if found else (0, 0, 0)
    if not 1 <= first <= last <= LARGEST or step < 1:
        problems.add(f"{named} is neither a count nor a range with a step", _HOW)
    elif beyond := (last - first) % step:
        below = last - beyond
        hint = f"{first}-{below}:{step} ends below it, {first}-{below + step}:{step} above"
        problems.add(f"{named} does not reach {last}", hint)
    else:
        return range(first, last + 1, step)
    return ()
