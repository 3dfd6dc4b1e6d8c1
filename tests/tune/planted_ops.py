"""Ops that need a GPU, with stand-ins for their kernels on a CPU; planted by faults.py at the tuner's place `spec`.

`Moe` is as FlashInfer writes cutlass_fused_moe in 0.6.16 and 0.7.4: its two products share one runner, which offers the
tactics of the product that was asked for last, and preparing it again frees the workspace that captured graphs read.
`Fp8` asks with the tensors of bmm_fp8, whose keys hold the shapes of two scales.
"""

import contextlib
import os
import signal
import time
from types import SimpleNamespace

import torch

from pipeline.tune import flashinfer_api
from pipeline.tune.ops import OpSpec
from pipeline.tune.ops.reference import rows_compared

at = flashinfer_api.load()

# ── CUDA graphs and events, for the place `cuda` ──

_captured, _replayed = [], []


class Graph:
    def __init__(self):
        self.calls = []

    def replay(self):
        _replayed.append(self)
        for call in self.calls:
            call()
        _replayed.pop()


@contextlib.contextmanager
def _capture(graph, pool):
    _captured.append(graph)
    yield
    _captured.pop()


def record(call):
    """Keep a call in the graph that is being captured, if one is."""
    if _captured:
        _captured[-1].calls.append(call)


def with_graphs(cuda):
    graphs = {"CUDAGraph": Graph, "graph": _capture, "graph_pool_handle": lambda: None}
    return SimpleNamespace(**{**vars(cuda), **graphs})


def hanging(cuda, hang, due):
    """Events of a GPU that works for itself: a sample that never ends is met by who waits for it. `due`: is it the next?"""

    class Event(cuda.Event):
        def __init__(self, **_):
            super().__init__()
            self.hangs = False

        def record(self, *_):
            super().record()
            self.hangs = due()

        def query(self):
            return False

        def synchronize(self):
            if self.hangs:
                hang()

    return SimpleNamespace(**{**vars(with_graphs(cuda)), "Event": Event})


# ── ops ──


def _config(rows_of=()):
    spec = at.DynamicTensorSpec((0,), (0,), (1,), at.make_bucket_mapper((1,)))
    return at.TuningConfig(
        dynamic_tensor_specs=(spec,), constraint_specs=tuple(at.ConstraintSpec(i, 0, _rows) for i in rows_of)
    )


def _rows(shapes):
    return int(shapes[0][0])


FIRST, SECOND = [0, 1, 2], [3, 4, 5]  # tactics of the two products; the last of each is the fastest


class MoERunner(at.TunableRunner):
    workspace = SimpleNamespace(free=True)  # one for all of a process

    def __init__(self, layer):
        self.layer_cache = layer  # FlashInfer leaves names that end in _cache out of a runner's identity
        self.gemm_idx_for_tuning = None

    def __hash__(self):
        return 1

    def get_valid_tactics(self, inputs, profile):
        return {1: FIRST, 2: SECOND}[self.gemm_idx_for_tuning]

    def forward(self, inputs, tactic=-1, do_preparation=False, gemm_idx=0, **_):
        if do_preparation:
            MoERunner.workspace.free = True
            MoERunner.workspace = SimpleNamespace(free=False)
            return inputs[1]
        own = {1: FIRST, 2: SECOND}[gemm_idx]
        if tactic not in (-1, *own):
            raise RuntimeError("a tactic of the other product")
        room = MoERunner.workspace

        def run():
            if room.free and _replayed:
                raise RuntimeError("its workspace was freed")
            time.sleep(0.0005 if tactic == own[-1] else 0.02)  # a busy machine sleeps some ms longer
            if tactic == self.layer_cache.wrong:
                inputs[1].fill_(float("nan"))
            if tactic == self.layer_cache.crashes and len(inputs[0]) == 5:
                os.kill(os.getpid(), signal.SIGSEGV)

        record(run)
        run()
        return inputs[1]


class Moe:
    """`wrong`: a tactic. `crashes`: one, at 5 tokens, where nothing is measured. `call_needs`: tokens for which there is no
    memory; `reference_needs`: rows of the reference.
    """

    bucket_only = True

    def __init__(self, wrong=None, crashes=None, call_needs=0, reference_needs=0):
        self.wrong, self.crashes = wrong, crashes
        self._call_needs, self._reference_needs = call_needs, reference_needs

    def call(self, tokens):
        if tokens == self._call_needs:
            raise MemoryError("planted")
        runner, inputs, chosen = MoERunner(self), [torch.zeros(tokens, 8), torch.zeros(tokens, 8)], []
        for number in (1, 2):
            runner.gemm_idx_for_tuning = number
            name = f"trtllm::fused_moe::gemm{number}"
            chosen.append(at.AutoTuner.get().choose_one(name, [runner], _config((1,)), inputs, gemm_idx=number)[1])
        for number, tactic in enumerate(chosen, 1):
            runner(inputs, tactic=tactic, gemm_idx=number)
        return inputs[1]

    def excess(self, tokens, out):
        if rows_compared() > self._reference_needs > 0:
            raise MemoryError("planted")
        return float("inf") if bool(out.isnan().any()) else 0.5


class Fp8Runner(at.TunableRunner):
    def get_valid_tactics(self, inputs, profile):
        return [0, 1]

    def forward(self, inputs, tactic=-1, do_preparation=False, **_):
        return torch.mm(inputs[0], inputs[1].T, out=inputs[4])


class Fp8:
    bucket_only = True

    def call(self, tokens):
        one = torch.ones(())
        inputs = [torch.ones(tokens, 8), torch.ones(4, 8), one, one.clone(), torch.empty(tokens, 4)]
        runner, tactic = at.AutoTuner.get().choose_one("fp8_gemm", [Fp8Runner()], _config((4,)), inputs)
        return runner(inputs, tactic=tactic)

    def excess(self, tokens, out):
        return float((out - 8).abs().max())


def spec(kind, **more):
    case = {"Moe": Moe, "Fp8": Fp8}[kind](**more)
    return OpSpec(lambda op, device, seed: case, device="cpu")
