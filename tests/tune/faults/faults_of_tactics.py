"""Tactics that are wrong, fail, crash, or do not return."""

import ctypes
import os
import signal
import time

from planting import after, in_default, in_measured, in_run, is_juror, while_measuring

_CYCLES = 1 << 39  # of a kernel that spins: some five minutes


def all_tactics_fail():
    def fail(count):
        raise RuntimeError("planted failure")

    while_measuring(fail)


def tactic_missing():
    def change(module):
        runner = module.CpuWholeRunner
        real = runner.get_valid_tactics
        runner.get_valid_tactics = lambda self, inputs, profile: real(self, inputs, profile)[:-1]

    after("pipeline.tune.ops.cpu_mm", change)


def wrong_output():
    def change(module):
        real = module._run

        def run(tactic, kept, a, b, out):
            real(tactic, kept, a, b, out)
            out[0, 0] += 1

        module._run = run

    after("pipeline.tune.ops.cpu_mm", change)


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

    after("pipeline.tune.ops.cpu_mm", change)


def crashing_tactic():
    in_run(lambda tactic, out: _crash(tactic[:2] == ("blas", "nk") and out.shape == (8, 192)))


def every_tactic_crashes():
    in_run(lambda tactic, out: _crash(True))


def crashing_in_proof():
    """The one tactic that is fast crashes, but not where it is measured."""

    def action(tactic, out):
        if tactic[0] == "upcast":
            if out.shape == (24, 64):
                os._exit(3)
        else:
            time.sleep(0.0005)

    in_run(action)


def crashing_default():
    in_default(_crash)


def hanging_default():
    in_default(_hang)


def hanging_tactic():
    in_run(lambda tactic, out: _hang(tactic == ("blas", "nk", 0, 0, 1) and out.shape == (8, 192)))


def hanging_in_judging():
    """The one tactic that is fast hangs on rank 1, but not where it is measured."""
    _hanging_where_judged(0)


def hanging_in_rounds():
    """As above, but only in rounds: it has come back where its bench is made."""
    _hanging_where_judged(1)


def _hanging_where_judged(rounds_before):
    _one_is_fast()

    def change(module):
        real, rounds, seen = module.run, module.CpuBench.rounds, [0]

        def run(point, inputs, candidate):
            here = os.environ["RANK"] == "1" and len(inputs[0]) == 16 and seen[0] >= rounds_before
            _hang(here and candidate.tactic == ("upcast", "nk", 0, 0, 1))
            real(point, inputs, candidate)

        def counted(self, *words, **more):
            seen[0] += len(self._points[0].inputs[0]) == 16
            return rounds(self, *words, **more)

        module.run, module.CpuBench.rounds = run, counted

    after("pipeline.tune.judging.bench", change)


def hanging_twice():
    """A tactic of one op, and the one that is chosen for another where it is proved."""
    hanging_tactic()
    in_run(lambda tactic, out: _hang(tactic == ("upcast", "nk", 0, 0, 1) and out.shape == (24, 64)))
    _one_is_fast()


def _one_is_fast():
    def action(tactic, out):
        if tactic != ("upcast", "nk", 0, 0, 1):
            time.sleep(0.0005)

    in_run(action)


def _hang(when):
    """Be in a native call that never returns, and keep the interpreter to itself."""
    while when:
        ctypes.PyDLL(None).pause()


def hanging_on_a_gpu():
    """A tactic of each op does not return from the GPU at 16 tokens, where FlashInfer measures it."""

    def spin(count, inputs, tactic):
        _spin(tactic == 1 and len(inputs[0]) == 16)

    if not is_juror():
        in_measured(spin)


def hanging_in_rounds_on_a_gpu():
    """The first tactic of cuBLAS does not return at 16 tokens, in the rounds of judging alone."""

    def change(module):
        real = module.GpuBench.queue

        def queue(self, number, place, turn):
            point, candidate = self._points[place], self._candidates[number]
            name = type(point.runners[candidate.runner]).__name__
            _spin("Cublas" in name and candidate.tactic == 0 and len(point.inputs[0]) == 16)
            return real(self, number, place, turn)

        module.GpuBench.queue = queue

    after("pipeline.tune.judging.graphs", change)


def hanging_in_jurors_on_a_gpu():
    """The same in jurors alone."""
    if is_juror():
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

    in_run(fail)
    after("pipeline.tune.guard", change)


def _crash(when):
    if when:
        os.kill(os.getpid(), signal.SIGSEGV)
