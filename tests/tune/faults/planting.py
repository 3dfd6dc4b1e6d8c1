"""How faults are planted: changes to a module right after it was imported, and calls before a tactic is run."""

import importlib.abc
import importlib.util
import sys


def after(name, change):
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


def while_measuring(action):
    in_measured(lambda count, inputs, tactic: action(count))


def in_measured(action):
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

    after("pipeline.tune.tuner", change)


def is_juror():
    return "pipeline.tune.judging.juror" in sys.orig_argv


def in_run(action):
    def change(module):
        real = module._run

        def run(tactic, kept, a, b, out):
            action(tactic, out)
            real(tactic, kept, a, b, out)

        module._run = run

    after("pipeline.tune.ops.cpu_mm", change)


def in_default(action):
    def change(module):
        real = module.CpuRunner.forward

        def forward(self, inputs, tactic=-1, do_preparation=False, **more):
            action(tactic == -1 and not do_preparation)
            return real(self, inputs, tactic=tactic, do_preparation=do_preparation, **more)

        module.CpuRunner.forward = forward

    after("pipeline.tune.ops.cpu_mm", change)
