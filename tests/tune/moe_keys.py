"""Run in the tuner's interpreter: the file keys that FlashInfer's own trtllm-gen ops make of the adapters' calls.

No GPU: the compiled module is replaced by one that says which tactics it was asked for, and the AutoTuner by one that
only listens. All between the adapter's call and the key is FlashInfer's.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from flashinfer.autotuner import AutoTuner
from flashinfer.fused_moe import core

from pipeline.contract.opnames import TUNED_AS
from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api
from pipeline.tune.ops import adapter_of
from pipeline.tune.ops.clashes import clashes
from pipeline.tune.ops.trtllm_moe import layer

CPU = torch.device("cpu")
SHAPE = {"experts": 8, "local_experts": 4, "hidden": 256, "intermediate": 128, "top_k": 2, "tp": 1, "ep": 2}
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024)
PLANS = [
    OpPlan(op, op, SHAPE, {"a": dtype, "b": dtype, "out": "bfloat16"}, BUCKETS,
           options={"routing_method": "renormalize", **options})
    for op, dtype, options in (
        ("trtllm_bf16_moe", "bfloat16", {}),
        ("trtllm_fp8_per_tensor_scale_moe", "float8_e4m3fn", {}),
        ("trtllm_fp8_block_scale_moe", "float8_e4m3fn", {"format": "fp8_block"}),
        ("trtllm_fp4_block_scale_moe", "uint8", {"format": "nvfp4"}),
    )
]  # fmt: skip
BETWEEN = (1, 3, 300, 700, 1000)
OTHER = {"intermediate": 256, "local_experts": 8, "top_k": 4, "hidden": 512}


class Heard(BaseException):
    """The question came."""


def stand_in() -> list[Any]:
    """Replace the compiled module, and return where it puts what it is asked."""
    asked: list[Any] = []
    names = dict.fromkeys(re.findall(r"moe_op\.(\w+)", inspect.getsource(core)))
    op = SimpleNamespace(**names)
    op.trtllm_get_valid_moe_configs = lambda *key: asked.append([int(one) for one in key]) or [[8, 0]]
    module = SimpleNamespace(build_and_load=lambda: op, get_library_path=lambda: "", get_library_paths=list)
    core.gen_trtllm_gen_fused_moe_sm100_module = lambda **_: module
    core.setup_cubin_loader = lambda _: None
    core.get_compute_capability = lambda _: (10, 0)
    core.device_support_pdl = lambda _: True
    torch.cuda.current_device = lambda: 0
    return asked


def question(call: Callable[[int], object], tokens: int) -> tuple[Any, ...]:
    """What one call asks: name, runners, config, inputs."""
    heard: list[Any] = []

    def listen(name: str, runners: list[Any], config: Any, inputs: list[Any], **_: Any) -> Any:
        heard.extend((name, runners, config, inputs))
        raise Heard

    tuner = AutoTuner.get()
    tuner.choose_one = listen
    try:
        call(tokens)
    except Heard:
        pass
    finally:
        del tuner.choose_one
    return tuple(heard)


def key(call: Callable[[int], object], tokens: int) -> str:
    """The file key of one call."""
    name, (runner,), config, inputs = question(call, tokens)
    shapes = AutoTuner.get()._get_input_sizes(inputs)
    return str(AutoTuner._get_cache_key(name, runner, shapes, config, runner.get_cache_key_extras(inputs)).file_key)


def made(op: OpPlan) -> Any:
    """The adapter's case."""
    module: Any = adapter_of(op)
    module.need_capability = lambda *_: None
    return module.make(op, CPU, 3)


def routed(case: Any, tokens: int) -> None:
    """The bf16 layer as it is called with chosen experts, packed, in place of logits."""
    core.trtllm_bf16_routed_moe(
        topk_ids=torch.zeros(tokens, case._sizes.top_k, dtype=torch.int32),
        hidden_states=case._activation(tokens),
        gemm1_weights=case._laid[0],
        gemm2_weights=case._laid[1],
        **layer(case._op, case._sizes),
    )


def main() -> None:
    """One line of JSON."""
    asked, told, here = stand_in(), {}, flashinfer_api.version()
    for op in PLANS:
        case = made(op)
        name, (runner,), _, _ = question(case.call, 8)
        keys = {tokens: key(case.call, tokens) for tokens in (*BUCKETS, *BETWEEN)}
        others = {what: replace(op, name="other", shape={**op.shape, what: size}) for what, size in OTHER.items()}
        told[op.op] = {
            "names": [name, *TUNED_AS[op.op], *cast(Any, adapter_of(op)).CUSTOM_OPS],
            "runner": type(runner).__name__,
            "keys": len({keys[bucket] for bucket in BUCKETS}),
            "answers": [next(bucket for bucket in BUCKETS if keys[bucket] == keys[tokens]) for tokens in BETWEEN],
            "told apart": sorted(what for what, other in others.items() if key(made(other).call, 8) != keys[8]),
            "clashes": sorted(what for what, other in others.items() if clashes([op, other], here)),
            "tactics": dict(case.tactics(8)),
            "asked": asked[-1],
        }
        if op.op == "trtllm_bf16_moe":
            told["routed"] = [key(partial(routed, case), 8) != keys[8], question(partial(routed, case), 8)[0]]
    print(json.dumps(told))


main()
