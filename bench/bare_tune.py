"""What one would write without this pipeline: the ops of a plan under FlashInfer's autotune(), saved by rank 0.

    torchrun --nproc-per-node N bare_tune.py PLAN OUT

`bench.tune` runs it, in the interpreter that has torch and FlashInfer; on a GPU it can be run by hand. No contract, no
watchdog, no check of what came out. The clock is the same as the pipeline's on a CPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def main(plan_file: str, out: str) -> None:
    """Tune and save."""
    import torch
    import torch.distributed as dist
    from flashinfer.autotuner import AutoTuner, autotune, set_autotune_process_group

    from pipeline.tune.arguments import read_plan
    from pipeline.tune.cpu_shim import CPU_KNOBS, cpu_clock
    from pipeline.tune.ops import spec_of

    dist.init_process_group("gloo")
    set_autotune_process_group(dist.group.WORLD)
    plan = read_plan(Path(plan_file))
    on_cpu = plan.device == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.cuda.set_device(device)
    tuner = AutoTuner._instance = AutoTuner(**CPU_KNOBS) if on_cpu else AutoTuner()
    with cpu_clock() if on_cpu else contextlib.nullcontext():
        for op in plan.ops:
            case = spec_of(op).make(op, device, plan.seed)
            with autotune(True, tuning_buckets=op.buckets, round_up=plan.round_up):
                case.call(op.buckets[-1])
    if dist.get_rank() == 0:
        tuner.save_configs(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
