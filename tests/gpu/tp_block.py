"""A small tensor-parallel transformer block: FlashInfer GEMMs, an NCCL all-reduce, tactics from a baked cache.

    torchrun --nproc-per-node=2 tp_block.py tuned|default|tune [ROOT]

`tuned` loads the cache below ROOT (in an image: its own), `default` none, `tune` measures all tactics in step first, as a
server without a cache does.

Rank 0 prints one line of JSON: seconds to the first token, hits among FlashInfer's lookups, whether anything was
measured, and whether the ranks' outputs agree.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from typing import Any

BEGAN = time.perf_counter()
HIDDEN, INTERMEDIATE, QKV = 4096, 14336, 6144
LAYERS = 4
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 8192)


def main(mode: str, root: str = "") -> None:
    """Run a prefill and eight decode steps on every rank."""
    import torch
    import torch.distributed as dist
    from flashinfer import mm_bf16
    from flashinfer.autotuner import AutoTuner, autotune, set_autotune_process_group

    from pipeline.tune.runtime import tuned

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(1)  # the same activations on every rank; weights differ by rank
    x = torch.randn(512, HIDDEN, device=device, dtype=torch.bfloat16) * 0.1
    torch.manual_seed(2 + rank)

    def weight(n: int, k: int) -> Any:
        return (torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5).t()

    shapes = ((QKV // world, HIDDEN), (HIDDEN, HIDDEN // world), (2 * INTERMEDIATE // world, HIDDEN),
              (HIDDEN, INTERMEDIATE // world))  # fmt: skip
    layers = [[weight(n, k) for n, k in shapes] for _ in range(LAYERS)]
    counts = {"lookups": 0, "hits": 0, "measured": 0}
    tuner = AutoTuner.get()
    search, profile = tuner.search_cache, tuner._profile_single_kernel

    def counted(*words: Any, **named: Any) -> Any:
        found = search(*words, **named)
        counts["lookups"] += 1
        counts["hits"] += bool(found[0])
        return found

    def measured(*words: Any, **named: Any) -> Any:
        counts["measured"] += 1
        return profile(*words, **named)

    tuner.search_cache, tuner._profile_single_kernel = counted, measured

    def forward(h: Any) -> Any:
        for qkv, o, up, down in layers:
            a = mm_bf16(h, qkv, backend="cublaslt")[:, : HIDDEN // world].contiguous()
            a = mm_bf16(a, o, backend="cublaslt")
            dist.all_reduce(a)
            h = h + a
            gate, value = mm_bf16(h, up, backend="cublaslt").chunk(2, dim=-1)
            m = mm_bf16((torch.nn.functional.silu(gate) * value).contiguous(), down, backend="cublaslt")
            dist.all_reduce(m)
            h = torch.nn.functional.layer_norm(h + m, (HIDDEN,))
        return h

    if mode == "tune":
        set_autotune_process_group(dist.new_group(list(range(world)), backend="gloo"))
        with autotune(True, tuning_buckets=BUCKETS):
            for weights in layers[0]:
                most = torch.randn(BUCKETS[-1], weights.shape[0], device=device, dtype=torch.bfloat16)
                mm_bf16(most, weights, backend="cublaslt")
        set_autotune_process_group(None)
    profiled = counts["measured"]
    counts.update(lookups=0, hits=0, measured=0)
    with tuned(root or None, require=True) if mode == "tuned" else nullcontext():
        out = forward(x)
        torch.cuda.synchronize(device)
        first = time.perf_counter() - BEGAN
        began = time.perf_counter()
        for _ in range(8):
            out = forward(out[-1:].contiguous())
        torch.cuda.synchronize(device)
        step = (time.perf_counter() - began) / 8
    others = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(others, out)
    same = all(torch.equal(other, others[0]) for other in others)
    if rank == 0:
        told = {
            "mode": mode,
            "measured before": profiled,
            "first token s": round(first, 3),
            "decode step ms": round(step * 1e3, 3),
            **counts,
        }
        print(json.dumps({**told, "ranks agree": same, "finite": bool(torch.isfinite(out).all())}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("tuned", "default", "tune"))
    parser.add_argument("root", nargs="?", default="", metavar="ROOT")
    options = parser.parse_args()
    main(options.mode, options.root)
