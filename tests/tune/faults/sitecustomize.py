"""Faults for tests: Python imports this at start when its directory is on PYTHONPATH.

PIPELINE_TEST_FAULT names a function below; it runs in the rank PIPELINE_TEST_RANK (`*`: in each), right after the
module that it wants to break was imported. The product knows nothing of it.
"""

import ctypes
import errno
import importlib
import importlib.abc
import importlib.util
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

_AT = 5  # the measurement at which something happens
_LONG = 600  # seconds: longer than any bound of a test


def _after(name, change):
    """Call `change(module)` as soon as `name` has been imported."""
    if name in sys.modules:
        change(sys.modules[name])
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path, target=None):
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            real = spec.loader.exec_module

            def exec_module(module):
                real(module)
                change(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


def _while_measuring(action):
    _in_measured(lambda count, inputs, tactic: action(count))


def _in_measured(action):
    """Call `action(count, inputs, tactic)` in each call of a runner whose time FlashInfer takes."""

    def change(module):
        tuner, count = module.ObservedTuner, [0]
        real = tuner._profile_single_kernel

        def measure(self, runner, inputs, tactic, tuning_config, **kwargs):
            count[0] += 1

            class Broken(type(runner)):
                def forward(self, inputs, tactic=-1, **more):
                    action(count[0], inputs, tactic)
                    return super().forward(inputs, tactic=tactic, **more)

            Broken.__name__ = type(runner).__name__
            wrapped = Broken.__new__(Broken)
            wrapped.__dict__.update(runner.__dict__)
            return real(self, wrapped, inputs, tactic, tuning_config, **kwargs)

        tuner._profile_single_kernel = measure

    _after("pipeline.tune.tuner", change)


def killed():
    _while_measuring(lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == _AT else None)


def told_to_end():
    _while_measuring(lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == _AT else None)


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

    _after("pipeline.tune.rank", change)


def stopped():
    _while_measuring(lambda count: os.kill(os.getpid(), signal.SIGSTOP) if count == _AT else None)


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

    _after("pipeline.cache.otherkeys", change)


def stopped_while_starting():
    _after("pipeline.tune.jit", lambda module: os.kill(os.getpid(), signal.SIGSTOP))


def stopped_at_once():
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_for_a_while():
    def change(module):
        subprocess.Popen(["sh", "-c", f"sleep 5 && kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    _after("pipeline.tune.jit", change)


def too_slow():
    _while_measuring(lambda count: time.sleep(_LONG) if count == _AT else None)


def too_slow_everywhere():
    _while_measuring(lambda count: time.sleep(_LONG))


def slow():
    _while_measuring(lambda count: time.sleep(0.05))


def slow_preparation():
    _in_preparation(lambda: time.sleep(_LONG))


def slow_preparation_within_bound():
    _in_preparation(lambda: time.sleep(2))


def out_of_memory_in_preparation():
    _in_preparation(_exhaust)


def out_of_memory_in_drawing():
    _in_autotuner("_prepare_input_tensors", 2)


def out_of_memory_in_cloning():
    _in_autotuner("_prepare_input_tensors_with_batches", 2)


def out_of_memory_in_a_tactic():
    _while_measuring(lambda count: _exhaust() if count == _AT else None)


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

    _after("pipeline.tune.ops.cpu_mm", change)


def _in_autotuner(name, at):
    def change(module):
        real, count = getattr(module.AutoTuner, name), [0]

        def exhausted(self, *words, **more):
            count[0] += 1
            if count[0] == at:
                _exhaust()
            return real(self, *words, **more)

        setattr(module.AutoTuner, name, exhausted)

    _after("flashinfer.autotuner.autotuner", change)


def stuck_in_narrow():
    def change(module):
        real = module.ObservedTuner._profile_single_kernel

        def measure(self, runner, inputs, tactic, tuning_config, **more):
            if tuple(inputs[1].shape) == (64, 96):
                time.sleep(_LONG)
            return real(self, runner, inputs, tactic, tuning_config, **more)

        module.ObservedTuner._profile_single_kernel = measure

    _after("pipeline.tune.tuner", change)


def steady_clock():
    """Every rank measures the same times."""

    def change(module):
        module.AutoTuner._profile_single_kernel = lambda self, runner, inputs, tactic, config, **more: (
            1 + sum(map(ord, str(tactic))) / 1000
        )

    _after("flashinfer.autotuner.autotuner", change)


def flashinfer_0_6_15():
    _after("flashinfer.version", lambda module: setattr(module, "__version__", "0.6.15.post1"))


def flashinfer_0_6_12():
    _after("flashinfer.version", lambda module: setattr(module, "__version__", "0.6.12"))


def no_process_group():
    def change(module):
        del sys.modules["flashinfer.autotuner.autotuner"].set_autotune_process_group

    _after("flashinfer.autotuner", change)


def all_tactics_fail():
    def fail(count):
        raise RuntimeError("planted failure")

    _while_measuring(fail)


def other_tactic():
    def change(module):
        real = module.own_result

        def own_result(rank, held, used):
            key = sorted(held)[0]
            return real(rank, {**held, key: module.Held(held[key].runner, ["blas", "nk", 0, 0, 99])}, used)

        module.own_result = own_result

    _after("pipeline.tune.settle", change)


def entry_lost():
    def change(module):
        real = module.own_result
        module.own_result = lambda rank, held, used: real(rank, {k: held[k] for k in sorted(held)[1:]}, used)

    _after("pipeline.tune.settle", change)


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

    _after("pipeline.tune.planfile", change)


def warm_cache():
    def change(module):
        real = module._prepare

        def prepare(session, index, group):
            session.tuner._file_configs["('cpu_mm', 'CpuWholeRunner', ((1, 8),), ())"] = ("CpuWholeRunner", -1)
            return real(session, index, group)

        module._prepare = prepare

    _after("pipeline.tune.tuning", change)


def tactic_missing():
    def change(module):
        runner = module.CpuWholeRunner
        real = runner.get_valid_tactics
        runner.get_valid_tactics = lambda self, inputs, profile: real(self, inputs, profile)[:-1]

    _after("pipeline.tune.ops.cpu_mm", change)


def _plant(**places):
    """Functions for the places that the tuner offers (`pipeline.tune.hooks`)."""
    _after("pipeline.tune.hooks", lambda module: module.planted.update(places))


def _is_worker():
    """Whether this is a process beside a rank."""
    return "--multiprocessing-fork" in sys.orig_argv


def worker_dies():
    """A process beside a rank ends before it has said anything."""
    _plant(worker_start=lambda: os._exit(9))


def worker_hangs():
    """A process beside a rank does not come back where it prepares candidates."""
    if _is_worker():
        _plant(make_bench=lambda bucket: time.sleep(_LONG))


def worker_cannot_run_a_candidate():
    """What is no default fails at 16 tokens in the processes beside rank 1."""

    def fail(inputs, tactic):
        if len(inputs[0]) == 16 and tactic != -1:
            raise RuntimeError("planted")

    if _is_worker() and os.environ["RANK"] == "1":
        _plant(timed_call=fail)


def wrong_output():
    def change(module):
        real = module._run

        def run(tactic, kept, a, b, out):
            real(tactic, kept, a, b, out)
            out[0, 0] += 1

        module._run = run

    _after("pipeline.tune.ops.cpu_mm", change)


def default_wins():
    _in_run(lambda tactic, out: time.sleep(0.002))


def wrong_and_fast():
    def change(module):
        real = module._run

        def run(tactic, kept, a, b, out):
            if tactic[0] == "upcast":
                out.zero_()
            else:
                time.sleep(0.0005)
                real(tactic, kept, a, b, out)

        module._run = run
        first = module.CpuRunner.forward

        def forward(self, inputs, tactic=-1, do_preparation=False, **more):
            if tactic == -1 and not do_preparation:
                time.sleep(0.0005)
            return first(self, inputs, tactic=tactic, do_preparation=do_preparation, **more)

        module.CpuRunner.forward = forward

    _after("pipeline.tune.ops.cpu_mm", change)


def no_memory_to_compare():
    def fail(bucket):
        raise MemoryError("planted")

    _plant(make_bench=fail)


def as_on_a_gpu():
    """Candidates are timed the way of a GPU, against stand-ins for CUDA."""
    import cuda_on_cpu

    _after("pipeline.tune.compare.timing", cuda_on_cpu.stand_in)
    _after("pipeline.tune.ops.cpu_mm", lambda module: setattr(module.CpuMatmul, "bucket_only", False))


def no_memory_together():
    """All buckets are timed in one go, for whose last there is no memory on rank 1 while others are held too."""
    as_on_a_gpu()
    made = []

    def fail(bucket):
        made.append(bucket)
        if not _is_worker() and os.environ["RANK"] == "1" and made == [1, 16]:
            raise MemoryError("planted")

    _plant(make_bench=fail)


def _in_run(action):
    def change(module):
        real = module._run

        def run(tactic, kept, a, b, out):
            action(tactic, out)
            real(tactic, kept, a, b, out)

        module._run = run

    _after("pipeline.tune.ops.cpu_mm", change)


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

    _after("pipeline.tune.ranks", change)


def other_environment():
    os.environ["FLASHINFER_AUTOTUNE_PLANTED"] = "1"


def other_rounding():
    _other_plan(lambda plan, replace: replace(plan, round_up=True))


def crashing_tactic():
    _in_run(lambda tactic, out: _crash(tactic[:2] == ("blas", "nk") and out.shape == (8, 192)))


def every_tactic_crashes():
    _in_run(lambda tactic, out: _crash(True))


def crashing_in_proof():
    """The tactics that are fastest crash, but not where they are measured."""

    def action(tactic, out):
        if tactic[0] == "upcast" and out.shape == (24, 64):
            os._exit(3)

    _in_run(action)
    _found_fastest(lambda tactic: tactic[0] == "upcast")


def crashing_default():
    _in_default(_crash)


def _in_default(action):
    def change(module):
        real = module.CpuRunner.forward

        def forward(self, inputs, tactic=-1, do_preparation=False, **more):
            action(tactic == -1 and not do_preparation)
            return real(self, inputs, tactic=tactic, do_preparation=do_preparation, **more)

        module.CpuRunner.forward = forward

    _after("pipeline.tune.ops.cpu_mm", change)


def hanging_default():
    _in_default(_hang)


def hanging_tactic():
    _in_run(lambda tactic, out: _hang(tactic == ("blas", "nk", 0, 0, 1) and out.shape == (8, 192)))


def hanging_in_comparing():
    """The one tactic that is fast hangs on rank 1, but not where it is measured."""
    _hanging_where_judged(0)


def hanging_in_rounds():
    """As above, but only in rounds: it has come back where its bench is made."""
    _hanging_where_judged(1)


def _hanging_where_judged(after):
    _one_is_fast()
    seen = [0]

    def call(inputs, tactic):
        if len(inputs[0]) == 16 and tactic == ("upcast", "nk", 0, 0, 1):
            seen[0] += 1
            _hang(os.environ["RANK"] == "1" and seen[0] > after)

    _plant(timed_call=call)


def hanging_twice():
    """A tactic of one op, and the one that is chosen for another where it is proved."""
    hanging_tactic()
    _in_run(lambda tactic, out: _hang(tactic == ("upcast", "nk", 0, 0, 1) and out.shape == (24, 64)))
    _one_is_fast()


def _one_is_fast():
    _found_fastest(lambda tactic: tactic == ("upcast", "nk", 0, 0, 1))


def _found_fastest(these):
    """FlashInfer measures every tactic, and finds these far faster than the others, however busy the machine is."""

    def change(module):
        real = module.AutoTuner._profile_single_kernel

        def measure(self, runner, inputs, tactic, tuning_config, **more):
            time_ms = real(self, runner, inputs, tactic, tuning_config, **more)
            return time_ms if math.isinf(time_ms) else 0.1 if these(tactic) else 1.0

        module.AutoTuner._profile_single_kernel = measure

    _after("flashinfer.autotuner.autotuner", change)


def _hang(when):
    """Be in a native call that never returns, and keep the interpreter to itself."""
    while when:
        ctypes.PyDLL(None).pause()


_CYCLES = 1 << 39  # of a kernel that spins: some five minutes


def hanging_on_a_gpu():
    """A tactic of each op does not return from the GPU at 16 tokens, where FlashInfer measures it."""

    def spin(count, inputs, tactic):
        _spin(tactic == 1 and len(inputs[0]) == 16)

    if not _is_worker():
        _in_measured(spin)


def hanging_in_rounds_on_a_gpu():
    """The first tactic of cuBLAS does not return at 16 tokens, where samples are taken alone."""

    def spin(inputs, runner, tactic):
        _spin("Cublas" in type(runner).__name__ and tactic == 0 and len(inputs[0]) == 16)

    _plant(launch=spin)


def hanging_in_workers_on_a_gpu():
    """The same in the processes beside a rank alone."""
    if _is_worker():
        hanging_in_rounds_on_a_gpu()


def _spin(when):
    if when:
        import torch

        torch.cuda._sleep(_CYCLES)


def device_lost():
    """A tactic fails and leaves no GPU behind."""

    def fail(tactic, out):
        if tactic[:2] == ("blas", "nk") and out.shape == (8, 192):
            raise RuntimeError("planted illegal access")

    def change(module):
        real = module.survive

        def survive(error):
            if "illegal" in str(error):
                raise module.DeviceLost("AcceleratorError: planted")
            real(error)

        module.survive = survive

    _in_run(fail)
    _after("pipeline.tune.guard", change)


def _crash(when):
    if when:
        os.kill(os.getpid(), signal.SIGSEGV)


def tuning_in_replay():
    def change(module):
        real = module.settings
        module.settings = lambda plan, op, *, tune: real(plan, op, tune=True)

    _after("pipeline.tune.coverage", change)


def file_changed_in_replay():
    def change(module):
        with (pathlib.Path(sys.argv[1]) / "autotune_configs.json").open("ab") as stream:
            stream.write(b"\n")

    _after("pipeline.tune.tokens", change)


def no_room_to_keep():
    def full(path, value):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _after("pipeline.tune.keeping", lambda module: setattr(module, "write_json", full))


def broken_blocklist():
    os.environ["FLASHINFER_TACTICS_BLOCKLIST"] = __file__  # no JSON


def name_missing():
    _after("flashinfer.autotuner.autotuner", lambda module: delattr(module.AutoTuner, "_get_cache_key"))


_fault, _rank = os.environ.get("PIPELINE_TEST_FAULT"), os.environ.get("PIPELINE_TEST_RANK", "1")
if os.environ.get("PIPELINE_TEST_WARM"):  # warm.py: processes are forked, not started
    sys.executable = os.environ["PIPELINE_TEST_WARM"]
if _fault and "RANK" in os.environ and _rank in (os.environ["RANK"], "*"):
    globals()[_fault]()
