"""Faults of judging and of jurors, and hearings as a GPU has them."""

import os
import time

from planting import after, in_run, is_juror


def juror_dies():
    """A juror's process ends before it has said anything."""
    if is_juror():
        after("pipeline.tune.judging.questions", lambda module: os._exit(9))


def juror_leaves_a_key_out():
    """A juror answers for one key less than it was asked for; in the rank no candidate is ruled out unasked."""
    if not is_juror():
        judged_together()
        after("pipeline.tune.judging.rule", lambda module: _leads(module, None))
        return
    import json

    real = json.dumps

    def dumps(said, *words, **more):
        shorter = isinstance(said, dict) and "heard" in said
        return real({**said, "heard": said["heard"][:-1]} if shorter else said, *words, **more)

    json.dumps = dumps


def juror_cannot_run_a_candidate():
    """On the way of a GPU, what is no default fails at 16 tokens in the jurors of rank 1."""
    as_on_a_gpu()
    _five_sittings()

    def change(module):
        real = module.run

        def run(point, inputs, candidate):
            if len(inputs[0]) == 16 and candidate.tactic != -1:
                raise RuntimeError("planted")
            real(point, inputs, candidate)

        module.run = run

    if is_juror() and os.environ["RANK"] == "1":
        after("pipeline.tune.judging.bench", change)


def jurors_have_no_memory_for_two_keys():
    """For one in the jurors of rank 0, for another in those of rank 1."""
    judged_together()
    _five_sittings()

    def change(module):
        real = module.bench

        def bench(points, candidates, device, told, bucket, **more):
            if bucket == (1, 16)[int(os.environ["RANK"])]:
                raise MemoryError("planted")
            return real(points, candidates, device, told, bucket, **more)

        module.bench = bench

    if is_juror():
        after("pipeline.tune.judging.benches", change)


def rounds_fail_at_16():
    """Benches can be made, and those of 16 tokens not be timed."""

    def change(module):
        real = module.CpuBench.rounds

        def rounds(self, *words, **more):
            if len(self._points[0].inputs[0]) == 16:
                raise RuntimeError("planted")
            return real(self, *words, **more)

        module.CpuBench.rounds = rounds

    after("pipeline.tune.judging.bench", change)


def _leads(module, number):
    """So many candidates are not ruled out unasked."""
    module.leading = lambda screened, processes=1: sorted(screened)[:number]


def _five_sittings():
    """The default and one more are timed in five sittings, and a row's note ends with the processes that these were in."""
    from dataclasses import replace

    def rule(module):
        _leads(module, 2)
        real = module.settle
        module.MOST_SITTINGS = 5
        module.contenders = lambda sittings, processes=1: sorted(sittings[-1][-1])
        module.settle = lambda *words: replace(real(*words), clear=False, drop=())

    def court(module):
        real = module.Court._decide

        def decide(self, matter, seconds):
            real(self, matter, seconds)
            judged = self.session.measured.judged
            (key,) = judged.keys() - told
            told.add(key)
            judged[key] = replace(judged[key], note=f"{judged[key].note}; seats {matter.seats}")

        told = set()
        module.Court._decide = decide

    after("pipeline.tune.judging.rule", rule)
    after("pipeline.tune.judging.court", court)


def slow_bench_of_wide():
    """To make a bench takes long for one op."""

    def change(module):
        real = module.bench

        def bench(points, *words, **more):
            time.sleep(1.5 * (tuple(points[0].inputs[1].shape) == (192, 64)))
            return real(points, *words, **more)

        module.bench = bench

    after("pipeline.tune.judging.hearing", change)


def default_wins():
    in_run(lambda tactic, out: time.sleep(0.002))


def no_memory_to_judge():
    def change(module):
        def bench(*_, **__):
            raise MemoryError("planted")

        module.bench = bench

    after("pipeline.tune.judging.hearing", change)


def judged_together():
    """All buckets in one hearing, as on a GPU."""
    after("pipeline.tune.judging.court", lambda module: setattr(module, "together", lambda device, buckets: [buckets]))


def as_on_a_gpu():
    """Judging goes the way of a GPU, against stand-ins for CUDA."""
    import cuda_on_cpu

    for name, change in cuda_on_cpu.CHANGES.items():
        after(f"pipeline.tune.judging.{name}", change)


def no_memory_together():
    """All buckets in one hearing, for whose last there is no memory on rank 1 while others are held too."""
    judged_together()

    def change(module):
        real, benches = module.bench, []

        def bench(points, candidates, device, told, bucket, **more):
            benches.append(bucket)
            if os.environ["RANK"] == "1" and benches == [1, 16]:
                time.sleep(1)  # until rank 0's step has been read
                raise MemoryError("planted")
            return real(points, candidates, device, told, bucket, **more)

        module.bench = bench

    after("pipeline.tune.judging.hearing", change)
