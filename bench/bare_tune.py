"""What one would write without this pipeline: the ops of a plan under FlashInfer's autotune(), saved by rank 0.

    torchrun --nproc-per-node N bare_tune.py PLAN OUT

`bench.tune` runs it, in the interpreter that has torch and FlashInfer. No contract, no watchdog, no check of what came
out. The clock is the same as the pipeline's on a CPU.
"""

from __future__ import annotations

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
    tuner = AutoTuner._instance = AutoTuner(**CPU_KNOBS)
    with cpu_clock():
        for op in plan.ops:
            case = spec_of(op).make(op, torch.device("cpu"), plan.seed)
            with autotune(True, tuning_buckets=op.buckets, round_up=plan.round_up):
                case.call(op.buckets[-1])
    if dist.get_rank() == 0:
        tuner.save_configs(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
