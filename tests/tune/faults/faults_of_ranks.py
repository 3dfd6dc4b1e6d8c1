"""Faults of ranks: how they end, what they lack, and where they differ from the others."""

import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from planting import after, while_measuring

_AT = 5  # the measurement at which something happens


def killed():
    while_measuring(lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == _AT else None)


def told_to_end():
    while_measuring(lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == _AT else None)


def killed_when_all_is_done():
    """After the last meeting of the ranks, before it has said that it is done."""

    def change(module):
        real = module.live

        def live(rank, work, body):
            def to_the_end(steps):
                body(steps)
                os.kill(os.getpid(), signal.SIGKILL)

            return real(rank, work, to_the_end)

        module.live = live

    after("pipeline.tune.rank", change)


def stopped():
    while_measuring(lambda count: os.kill(os.getpid(), signal.SIGSTOP) if count == _AT else None)


def second_keys():
    """Answers of `cpu_mm` stand under a second key, as those of `bmm_fp8` do, which needs a GPU.

    It is that of a weight of shape (1, n, k) in place of (n, k).
    """

    def other_keys(key):
        other = re.sub(r"^(\('cpu_mm', '\w+', \(\(\d+, \d+\), \()(\d+, \d+\), )", r"\g<1>1, \2", key)
        return (other,) if other != key else ()

    def change(module):
        module.other_keys = other_keys
        module.other_shapes = lambda shapes: (shapes[0], (1, *shapes[1]), *shapes[2:])

    after("pipeline.cache.otherkeys", change)


def stopped_while_starting():
    after("pipeline.tune.jit", lambda module: os.kill(os.getpid(), signal.SIGSTOP))


def stopped_at_once():
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_for_a_while():
    def change(module):
        subprocess.Popen(["sh", "-c", f"sleep 5 && kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    after("pipeline.tune.jit", change)


def too_slow():
    while_measuring(lambda count: time.sleep(60) if count == _AT else None)


def too_slow_everywhere():
    while_measuring(lambda count: time.sleep(60))


def slow():
    while_measuring(lambda count: time.sleep(0.05))


def slow_preparation():
    _in_preparation(lambda: time.sleep(60))


def slow_preparation_within_bound():
    _in_preparation(lambda: time.sleep(2))


def out_of_memory_in_preparation():
    _in_preparation(_exhaust)


def out_of_memory_in_drawing():
    _in_autotuner("_prepare_input_tensors", 2)


def out_of_memory_in_cloning():
    _in_autotuner("_prepare_input_tensors_with_batches", 2)


def out_of_memory_in_a_tactic():
    while_measuring(lambda count: _exhaust() if count == _AT else None)


def _exhaust():
    import torch

    raise torch.cuda.OutOfMemoryError("planted exhaustion")


def _in_preparation(action):
    def change(module):
        real, count = module.CpuWholeRunner.forward, [0]

        def forward(self, inputs, tactic=-1, do_preparation=False, **more):
            count[0] += do_preparation
            if do_preparation and count[0] == 2:
                action()
            return real(self, inputs, tactic=tactic, do_preparation=do_preparation, **more)

        module.CpuWholeRunner.forward = forward

    after("pipeline.tune.ops.cpu_mm", change)


def _in_autotuner(name, at):
    def change(module):
        real, count = getattr(module.AutoTuner, name), [0]

        def exhausted(self, *words, **more):
            count[0] += 1
            if count[0] == at:
                _exhaust()
            return real(self, *words, **more)

        setattr(module.AutoTuner, name, exhausted)

    after("flashinfer.autotuner.autotuner", change)


def stuck_in_narrow():
    def change(module):
        real = module.ObservedTuner._profile_single_kernel

        def measure(self, runner, inputs, tactic, tuning_config, **more):
            if tuple(inputs[1].shape) == (64, 96):
                time.sleep(60)
            return real(self, runner, inputs, tactic, tuning_config, **more)

        module.ObservedTuner._profile_single_kernel = measure

    after("pipeline.tune.tuner", change)


def steady_clock():
    """Every rank measures the same times."""

    def change(module):
        module.AutoTuner._profile_single_kernel = lambda self, runner, inputs, tactic, config, **more: (
            1 + sum(map(ord, str(tactic))) / 1000
        )

    after("flashinfer.autotuner.autotuner", change)


def flashinfer_0_6_15():
    after("flashinfer.version", lambda module: setattr(module, "__version__", "0.6.15.post1"))


def flashinfer_0_6_12():
    after("flashinfer.version", lambda module: setattr(module, "__version__", "0.6.12"))


def no_process_group():
    def change(module):
        del sys.modules["flashinfer.autotuner.autotuner"].set_autotune_process_group

    after("flashinfer.autotuner", change)


def other_tactic():
    def change(module):
        real = module.own_result

        def own_result(rank, held, used):
            key = sorted(held)[0]
            return real(rank, {**held, key: module.Held(held[key].runner, ["blas", "nk", 0, 0, 99])}, used)

        module.own_result = own_result

    after("pipeline.tune.settle", change)


def entry_lost():
    def change(module):
        real = module.own_result
        module.own_result = lambda rank, held, used: real(rank, {k: held[k] for k in sorted(held)[1:]}, used)

    after("pipeline.tune.settle", change)


def other_buckets():
    _other_plan(lambda plan, replace: replace(plan, ops=(replace(plan.ops[0], buckets=plan.ops[0].buckets[:-1]),)))


def other_skip_ops():
    _other_plan(lambda plan, replace: replace(plan, skip_ops=("cpu_mm",)))


def other_seed():
    _other_plan(lambda plan, replace: replace(plan, seed=plan.seed + 1))


def _other_plan(edit):
    def change(module):
        from dataclasses import replace

        real = module.read_plan
        module.read_plan = lambda path: edit(real(path), replace)

    after("pipeline.tune.planfile", change)


def warm_cache():
    def change(module):
        real = module._prepare

        def prepare(session, index, group):
            session.tuner._file_configs["('cpu_mm', 'CpuWholeRunner', ((1, 8),), ())"] = ("CpuWholeRunner", -1)
            return real(session, index, group)

        module._prepare = prepare

    after("pipeline.tune.tuning", change)


def each_field_differs():
    """Rank 1 says another value for one field after the other, in both contracts; each rank ends with what it heard."""

    def change(module):
        real, heard = module.Ranks.contract, []

        def contract(self, said, when, group=None):
            for name in said:
                try:
                    real(self, {**said, name: "another"} if self.rank == 1 else said, when, group)
                except module.agree.__globals__["RanksDiffer"] as error:
                    heard.append(error.message)
            real(self, said, when, group)
            if when != "before tuning":
                raise RuntimeError("; ".join(heard))

        module.Ranks.contract = contract

    after("pipeline.tune.ranks", change)


def other_environment():
    os.environ["FLASHINFER_AUTOTUNE_PLANTED"] = "1"


def other_rounding():
    _other_plan(lambda plan, replace: replace(plan, round_up=True))


def tuning_in_replay():
    def change(module):
        real = module.settings
        module.settings = lambda plan, op, *, tune: real(plan, op, tune=True)

    after("pipeline.tune.coverage", change)


def file_changed_in_replay():
    def change(module):
        with (pathlib.Path(sys.argv[1]) / "autotune_configs.json").open("ab") as stream:
            stream.write(b"\n")

    after("pipeline.tune.tokens", change)


def no_room_to_keep():
    def full(path, value):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    after("pipeline.tune.keeping", lambda module: setattr(module, "write_json", full))


def broken_blocklist():
    os.environ["FLASHINFER_TACTICS_BLOCKLIST"] = __file__  # no JSON


def name_missing():
    after("flashinfer.autotuner.autotuner", lambda module: delattr(module.AutoTuner, "_get_cache_key"))
