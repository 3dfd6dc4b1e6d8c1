"""A MoE layer on a CPU whose two products share one runner, as FlashInfer writes cutlass_fused_moe in 0.6.16 and 0.7.4:
which tactics are offered depends on the product that was asked for last, and preparing again frees the workspace that
captured graphs read. Run in an interpreter that has torch and FlashInfer; prints what comparing and verifying found.
"""

import contextlib
import json
import time
from types import SimpleNamespace

import cuda_on_cpu
import torch

from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.tune import flashinfer_api
from pipeline.tune.compare import timing
from pipeline.tune.compare.compare import compare_op
from pipeline.tune.compare.decide import Budget
from pipeline.tune.compare.second import Second
from pipeline.tune.coverage import Measured, settings
from pipeline.tune.cpu_shim import CPU_KNOBS, cpu_clock
from pipeline.tune.guard import OutOfMemory
from pipeline.tune.tuner import ObservedTuner
from pipeline.tune.verify import verify

at = flashinfer_api.load()
FIRST, SECOND = range(3), range(3, 6)  # tactics of the two products
FASTEST = {1: 2, 2: 5}
freed, wrong = [], set()


class MoERunner(at.TunableRunner):
    workspace = None

    def __init__(self):
        self.gemm_idx_for_tuning = None

    def __hash__(self):
        return 1

    def get_valid_tactics(self, inputs, profile):
        return list({1: FIRST, 2: SECOND}[self.gemm_idx_for_tuning])

    def forward(self, inputs, tactic=-1, do_preparation=False, gemm_idx=0, **_):
        if do_preparation:
            if MoERunner.workspace is not None:
                MoERunner.workspace.free = True
            MoERunner.workspace = SimpleNamespace(free=False)
            return
        if tactic not in (-1, *{1: FIRST, 2: SECOND}[gemm_idx]):
            raise RuntimeError("a tactic of the other product")
        room = MoERunner.workspace

        def kernel():
            if room is None or room.free:
                freed.append(tactic)
            time.sleep(0.0005 if tactic == FASTEST[gemm_idx] else 0.002)

        cuda_on_cpu.kernel(kernel)
        return


class Layer:
    bucket_only = True
    tokens_without_memory = rows_without_memory = 0
    config = at.TuningConfig(
        dynamic_tensor_specs=(at.DynamicTensorSpec((0,), (0,), (4,), at.make_bucket_mapper((4,))),),
    )

    def call(self, tokens):
        if tokens == self.tokens_without_memory:
            raise MemoryError("planted")
        runner, inputs, chosen = MoERunner(), [torch.zeros(tokens, 8)], []
        for product in (1, 2):
            runner.gemm_idx_for_tuning = product
            chosen.append(
                at.AutoTuner.get().choose_one(f"gemm{product}", [runner], self.config, inputs, gemm_idx=product)[1]
            )
        self.right = not wrong.intersection(chosen)
        return inputs[0]

    def excess(self, tokens, out):
        from pipeline.tune.ops.reference import rows_compared

        if rows_compared() > self.rows_without_memory > 0:
            raise MemoryError("planted")
        return 0.5 if self.right else 2.0


op = OpPlan("moe", "cpu_mm", {"n": 1, "k": 1}, {}, (4,))
plan = Plan("m", "cpu", "x", flashinfer_api.version(), Layout(), (op,))
steps = SimpleNamespace(say=lambda *_, **__: None, tick=lambda _: None, attempt=lambda *_: None)
tuner = ObservedTuner(CPU_KNOBS)
flashinfer_api.install(tuner)
session = SimpleNamespace(
    options=SimpleNamespace(compare="on"), plan=plan, device=torch.device("cpu"), tuner=tuner, measured=Measured(),
    ranks=SimpleNamespace(steps=steps, rank=0), second=Second(), compare_budget=Budget(60.0), blocked=[], notes=[],
)  # fmt: skip
case = Layer()


def alone(value):
    return [value]


def baked():
    return {key.split("'")[1]: one.tactic for key, one in flashinfer_api.entries(tuner).items()}


def notes():
    found, session.notes[:] = session.notes[:], []
    return found


timing.torch = SimpleNamespace(**{**vars(torch), "amax": lambda *_, **__: None})
cuda_on_cpu.stand_in(timing, timing.run)
told = {}
with cpu_clock():
    with settings(plan, op, tune=True):
        case.call(4)
    session.measured.add(op, tuner.watch.samples)
    freed.clear()
    compare_op(session, op, case, set(), alone)
    told["freed"] = freed[:]
    told["compared"] = {key.split("'")[1]: one["decided_by"] for key, one in session.measured.compared.items()}
    told["baked"] = baked()
    case.rows_without_memory = 100
    verify(session, op, case, set(), alone)
    told["out of memory in the reference"] = [session.blocked[:], notes()]
    case.rows_without_memory = 0
    case.tokens_without_memory = 4
    try:
        verify(session, op, case, set(), alone)
    except OutOfMemory as error:
        told["out of memory in the inputs"] = error.message
    case.tokens_without_memory = 0
    wrong.add(FASTEST[1])
    with contextlib.suppress(AssertionError):
        verify(session, op, case, set(), alone)
    told["blocked"] = [[one["custom_op"], one["tactic"]] for one in session.blocked]
print(json.dumps(told))
