"""Faults for tests: Python imports this at start when its directory is on PYTHONPATH.

PIPELINE_TEST_FAULT names a function below; it runs in the rank PIPELINE_TEST_RANK, right after the module that it
wants to break was imported. The product knows nothing of it.
"""

import importlib
import importlib.abc
import importlib.util
import os
import pathlib
import signal
import sys
import time

_AT = 5  # the measurement at which something happens


def _after(name, change):
    """Call `change(module)` as soon as `name` has been imported."""

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
    def change(module):
        tuner, count = module.ObservedTuner, [0]
        real = tuner._profile_single_kernel

        def measure(self, runner, inputs, tactic, tuning_config, **kwargs):
            count[0] += 1

            class Broken(type(runner)):
                def forward(self, inputs, tactic=-1, **more):
                    action(count[0])
                    return super().forward(inputs, tactic=tactic, **more)

            Broken.__name__ = type(runner).__name__
            wrapped = Broken.__new__(Broken)
            wrapped.__dict__.update(runner.__dict__)
            return real(self, wrapped, inputs, tactic, tuning_config, **kwargs)

        tuner._profile_single_kernel = measure

    _after("pipeline.tune.tuner", change)


def killed():
    _while_measuring(lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == _AT else None)


def stopped():
    _while_measuring(lambda count: os.kill(os.getpid(), signal.SIGSTOP) if count == _AT else None)


def too_slow():
    _while_measuring(lambda count: time.sleep(60) if count == _AT else None)


def slow():
    _while_measuring(lambda count: time.sleep(0.05))


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
        real = module._tune_one

        def tune_one(session, index, op, group):
            session.tuner._file_configs["('cpu_mm', 'CpuWholeRunner', ((1, 8),), ())"] = ("CpuWholeRunner", -1)
            return real(session, index, op, group)

        module._tune_one = tune_one

    _after("pipeline.tune.tuning", change)


def tactic_missing():
    def change(module):
        runner = module.CpuWholeRunner
        real = runner.get_valid_tactics
        runner.get_valid_tactics = lambda self, inputs, profile: real(self, inputs, profile)[:-1]

    _after("pipeline.tune.ops.cpu_mm", change)


def wrong_output():
    def change(module):
        real = module._run

        def run(tactic, kept, a, b, out):
            real(tactic, kept, a, b, out)
            out[0, 0] += 1

        module._run = run

    _after("pipeline.tune.ops.cpu_mm", change)


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


def name_missing():
    _after("flashinfer.autotuner.autotuner", lambda module: delattr(module.AutoTuner, "_get_cache_key"))


_fault, _rank = os.environ.get("PIPELINE_TEST_FAULT"), os.environ.get("PIPELINE_TEST_RANK", "1")
if _fault and os.environ.get("RANK") == _rank:
    globals()[_fault]()
