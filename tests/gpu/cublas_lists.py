"""What stands behind cuBLAS's tactic numbers at each token count, and what could be gained.

    python -m tests.gpu.cublas_lists OUT.json [--seconds 75]

For the products of Llama-3.1-8B as `bmm_fp8`: the list of algorithms at every count to 512 and at steps above; the time
of every tactic at some 120 counts, until `--seconds` are over for all products together (`timed` says at how many). Prints,
for each product, at how many counts the list changes, the gain of the best tactic of each count (timed), and that of the
best one number per bucket of FlashInfer's, chosen with hindsight.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bench_h200 import geometric

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LISTED = sorted({*range(1, 513), *range(520, 2049, 8), *range(2112, 8193, 64)})
TIMED = sorted({1, 2, 3, 4, 5, 7, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
                *range(1152, 2049, 128), *range(2560, 4097, 512), *range(5120, 8193, 1024), 12, 20, 28, 37, 43, 51, 61, 69,
                77, 85, 93, 101, 109, 117, 125, 139, 155, 171, 187, 203, 219, 235, 251, 271, 300, 333, 361, 397, 430, 460,
                490, 540, 610, 660, 700, 740, 800, 850, 900, 940, 1000, 1100, 1200, 1330, 1460, 1600, 1700, 1850, 2000,
                2300, 2800, 3300, 3700, 4500, 5000, 6000, 7000})  # fmt: skip
ALGORITHM = 64  # bytes of one in the list
ROUNDS = 4


def hindsight(times: Mapping[int, Mapping[int, float]], buckets: Sequence[int]) -> float:
    """The gain between the buckets of the best number for each bucket, chosen by the very times it is held against."""
    gains: list[float] = []
    for low, high in zip((0, *buckets), buckets, strict=False):
        inside = [own for tokens, own in times.items() if low < tokens < high]
        if inside:
            numbers = {n for own in inside for n in own}
            best = max(numbers, key=lambda n: geometric([own[-1] / own.get(n, own[-1]) for own in inside]))
            gains += [own[-1] / own.get(best, own[-1]) for own in inside]
    return geometric(gains)


class Product:
    """One product on the GPU: its weights several times, activations, and the runner."""

    def __init__(self, n: int, k: int) -> None:
        import torch
        from flashinfer.gemm import gemm_base

        def fp8(rows: int) -> Any:
            return (torch.randn(rows, k, device="cuda") * 0.5).to(torch.float8_e4m3fn)

        self._torch, self._runner = torch, gemm_base.get_gemm_module().cublas_fp8_gemm_runner()
        self._weights = [fp8(n) for _ in range(max(2, math.ceil(180e6 / (n * k))))]  # more than the L2 cache holds
        self._activations, self._size = fp8(8192), n * k
        self._workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        self._one = torch.ones((), device="cuda")

    def _inputs(self, tokens: int, weight: Any) -> list[Any]:
        out = self._torch.empty(1, tokens, weight.shape[0], dtype=self._torch.bfloat16, device="cuda")
        return [self._activations[:tokens][None], weight.t()[None], self._one, self._one, out, self._workspace]

    def algorithms(self, tokens: int) -> list[str]:
        """The list, in the order of the tactic numbers."""
        found, count = self._runner._get_algos(self._inputs(tokens, self._weights[0]))
        raw = bytes(found.numpy().tobytes())
        return [raw[at * ALGORITHM : (at + 1) * ALGORITHM].hex() for at in range(count)]

    def times(self, tokens: int, count: int) -> dict[int, float]:
        """Microseconds of each tactic and of the default (-1): the median of rounds in turn."""
        inputs = [self._inputs(tokens, weight) for weight in self._weights]
        guess = 2 * tokens * self._size / 8e8 + self._size / 3.5e6 + 2
        calls = max(len(inputs), math.ceil(400 / guess))
        graphs = {tactic: self._graph(inputs, tactic, calls) for tactic in range(-1, count)}
        found: dict[int, list[float]] = {tactic: [] for tactic in graphs}
        for turn in range(ROUNDS):
            for tactic in graphs if turn % 2 else [*graphs][::-1]:
                begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graphs[tactic].replay()
                end.record()
                end.synchronize()
                found[tactic].append(begin.elapsed_time(end) / calls * 1e3)
        return {tactic: round(statistics.median(times), 3) for tactic, times in found.items()}

    def _graph(self, inputs: Sequence[list[Any]], tactic: int, calls: int) -> Any:
        for one in inputs[:2]:
            self._runner(one, tactic=tactic)
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for call in range(calls):
                self._runner(inputs[call % len(inputs)], tactic=tactic)
        graph.replay()
        self._torch.cuda.synchronize()
        return graph


def main() -> None:
    """All products."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=75)
    options = parser.parse_args()
    import torch
    from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets

    began, found = time.monotonic(), {}
    torch.manual_seed(0)
    buckets = sorted(get_hybrid_num_tokens_buckets(8192))
    with torch.inference_mode():
        for name, (n, k) in SHAPES.items():
            product = Product(n, k)
            lists = {tokens: product.algorithms(tokens) for tokens in LISTED}
            changes = sum(lists[one] != lists[other] for one, other in itertools.pairwise(LISTED))
            times = {tokens: product.times(tokens, len(product.algorithms(tokens))) for tokens in TIMED
                     if time.monotonic() - began < options.seconds}  # fmt: skip
            found[name] = {"changes": changes, "of": len(LISTED) - 1, "times": times, "timed": len(times),
                           "best of each count": round(geometric([own[-1] / min(own.values()) for own in times.values()]), 4),
                           "best of each bucket": round(hindsight(times, buckets), 4)}  # fmt: skip
            options.out.write_text(json.dumps(found))
            print(name, {key: value for key, value in found[name].items() if key != "times"}, flush=True)
            del product
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
