"""An NCCL group that carries tensors, and a gloo group that averages FlashInfer's times, in one process at one time.

    torchrun --nproc-per-node=2 side_by_side.py [gloo]

Each rank tunes a small op over the gloo group while a collective of the first group is in flight, before and after every
op. Rank 0 prints one line of JSON: whether the sums were right, and whether the ranks chose alike. With `gloo` both
groups are gloo's and the op is a CPU's, which tries this script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os


def main(backend: str) -> None:
    """Tune three ops between all-reduces."""
    import torch
    import torch.distributed as dist
    from flashinfer.autotuner import set_autotune_process_group

    from pipeline.contract.plan import Layout, OpPlan, Plan
    from pipeline.tune import flashinfer_api
    from pipeline.tune.coverage import settings
    from pipeline.tune.cpu_shim import CPU_KNOBS, cpu_clock
    from pipeline.tune.ops import spec_of
    from pipeline.tune.tuner import ObservedTuner

    rank, world, cuda = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), backend == "nccl"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    times = dist.new_group(list(range(world)), backend="gloo")
    tuner = ObservedTuner({} if cuda else CPU_KNOBS)
    flashinfer_api.install(tuner)
    kind, dtype = ("mm_bf16", "bfloat16") if cuda else ("cpu_mm", "float32")
    names = dict.fromkeys(("a", "b", "out"), dtype)
    backends = ("cublaslt",) if cuda else ()
    ops = tuple(OpPlan(f"op{n}", kind, {"n": n, "k": 512}, names, (1, 16, 64), backends) for n in (512, 1024, 1536))
    plan = Plan("side by side", device.type, "", flashinfer_api.version(), Layout(tp=world), ops)
    right = True
    with cpu_clock() if not cuda else torch.no_grad():
        set_autotune_process_group(times)
        for op in ops:
            case = spec_of(op).make(op, device, 1)
            ones = torch.ones(1 << 20, device=device)
            work = dist.all_reduce(ones, async_op=True)
            with settings(plan, op, tune=True):
                case.call(op.buckets[-1])
            work.wait()
            right = right and bool((ones == world).all())
        set_autotune_process_group(None)
    mine = {key: held.answer().decode() for key, held in flashinfer_api.entries(tuner).items()}
    said: list[dict[str, str]] = [{} for _ in range(world)]
    dist.all_gather_object(said, mine, group=times)
    if rank == 0:
        told = {"groups": [backend, "gloo"], "entries": len(mine), "sums right": right}
        print(json.dumps({**told, "ranks agree": all(one == mine for one in said)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", nargs="?", default="nccl", choices=("nccl", "gloo"))
    main(parser.parse_args().backend)
