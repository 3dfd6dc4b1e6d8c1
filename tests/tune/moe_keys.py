"""Run in the tuner's interpreter: the file keys that FlashInfer's own MoE ops make of the adapters' calls.

No GPU: the compiled module is replaced by one that says which tactics it was asked for, and the AutoTuner by one that
only listens. All between the adapter's call and the key is FlashInfer's.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import moe_kernel
import torch
from flashinfer import fused_moe
from flashinfer.autotuner import AutoTuner
from flashinfer.fused_moe import core

from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.moe_keys import key_problems
from pipeline.flashinfer.ops import TUNED_AS
from pipeline.tune import flashinfer_api, ops
from pipeline.tune.ops import spec_of
from pipeline.tune.ops.trtllm import layer

CPU = torch.device("cpu")
ops.capability = lambda _: 90
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
BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
PLAIN = OpPlan("bf16", "cutlass_fused_moe", {**SHAPE, "local_experts": 8, "ep": 1}, BF16, BUCKETS)
MXFP4 = replace(PLAIN, name="mxfp4", dtypes={**BF16, "b": "uint8"},
                options={"format": "mxfp4", "activation": "swiglu_oai", "bias": "true"})  # fmt: skip
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


def cutlass_stand_in() -> None:
    """Replace the compiled module of `cutlass_fused_moe`, and the interleaving of weights, which runs on a GPU."""
    runner = SimpleNamespace(get_gemm1_tactic_count=lambda: 2, get_gemm2_tactic_count=lambda: 3)
    module = SimpleNamespace(init=lambda *_: runner, interleave_moe_weights_for_sm90_mixed_gemm=None)
    module.set_deepgemm_jit_include_dirs = lambda _: None
    core.gen_cutlass_fused_moe_sm90_module = lambda *_: SimpleNamespace(build_and_load=lambda: module)
    core.get_compute_capability = lambda _: (9, 0)
    torch.cuda.device = lambda _: contextlib.nullcontext()
    fused_moe.interleave_moe_weights_for_sm90_mixed_gemm = moe_kernel.laid


def question(call: Callable[[int], object], tokens: int, at: int = 0) -> tuple[Any, ...]:
    """What one call asks at last, after `at` questions: name, runners, config, inputs."""
    heard: list[Any] = []

    def listen(*asked: Any, **_: Any) -> Any:
        heard.append(asked)
        if len(heard) > at:
            raise Heard
        return asked[1][0], 0

    tuner = AutoTuner.get()
    tuner.choose_one = listen
    try:
        call(tokens)
    except Heard:
        pass
    finally:
        del tuner.choose_one
    return tuple(heard[at])


def key(call: Callable[[int], object], tokens: int, at: int = 0) -> str:
    """The file key of one question of a call."""
    name, (runner,), config, inputs = question(call, tokens, at)
    shapes = AutoTuner.get()._get_input_sizes(inputs)
    return str(AutoTuner._get_cache_key(name, runner, shapes, config, runner.get_cache_key_extras(inputs)).file_key)


def made(op: OpPlan) -> Any:
    """The adapter's case."""
    return spec_of(op).build(op, CPU, 3)


def routed(case: Any, tokens: int) -> None:
    """The bf16 layer as it is called with chosen experts, packed, in place of logits."""
    core.trtllm_bf16_routed_moe(
        topk_ids=torch.zeros(tokens, case.sizes.top_k, dtype=torch.int32),
        hidden_states=case.activation(tokens),
        gemm1_weights=case.laid[0],
        gemm2_weights=case.laid[1],
        **layer(case.op, case.sizes),
    )


def unfused(case: Any, tokens: int) -> None:
    """A call as SGLang 0.5.23 makes it; arguments change that."""
    real = fused_moe.cutlass_fused_moe
    fused_moe.cutlass_fused_moe = partial(real, use_fused_finalize=False)
    try:
        case.call(tokens)
    finally:
        fused_moe.cutlass_fused_moe = real


def divided(rank: int) -> OpPlan:
    """The mxfp4 layer over two ranks that divide each expert, as one of them calls it."""
    os.environ["RANK"] = str(rank)
    return replace(MXFP4, shape={**MXFP4.shape, "tp": 2})


def cutlass_keys(here: str) -> dict[str, Any]:
    """What the keys of an mxfp4 layer tell apart, of both its questions."""
    cutlass_stand_in()
    case, told = made(MXFP4), []
    others = {what: {**MXFP4.shape, what: size} for what, size in {**OTHER, "local_experts": 4, "tp": 2}.items()}
    layers = {what: replace(MXFP4, name="other", shape=shape) for what, shape in others.items()}
    for at, stage in enumerate(TUNED_AS["cutlass_fused_moe"]):
        name, (runner,), _, inputs = question(case.call, 8, at)
        first = key(case.call, 8, at)
        keys = {tokens: key(case.call, tokens, at) for tokens in (*BUCKETS, *BETWEEN)}
        told.append({
            "names": [name, stage],
            "inputs": [list(one.shape) for one in inputs],
            "tactics": runner.get_valid_tactics(inputs, None),
            "answers": [next(bucket for bucket in BUCKETS if keys[bucket] == keys[tokens]) for tokens in BETWEEN],
            "told apart": sorted(what for what, other in layers.items() if key(made(other).call, 8, at) != first),
            "clashes": sorted(what for what, other in layers.items() if key_problems([MXFP4, other], here)),
            "ranks": len({key(made(divided(rank)).call, 8, at) for rank in (0, 1)}),
            "of bf16": key(made(PLAIN).call, 8, at) == first,
            "as SGLang": key(partial(unfused, case), 8, at) == first,
        })  # fmt: skip
    return {
        "cutlass": told,
        "offered": flashinfer_api.first_offer(case.call, 8),
        "beside bf16": key_problems([PLAIN, MXFP4], here),
    }


def main() -> None:
    """One line of JSON."""
    asked, told, here = stand_in(), {}, flashinfer_api.version()
    for op in PLANS:
        case = made(op)
        name, (runner,), _, _ = question(case.call, 8)
        keys = {tokens: key(case.call, tokens) for tokens in (*BUCKETS, *BETWEEN)}
        others = {what: replace(op, name="other", shape={**op.shape, what: size}) for what, size in OTHER.items()}
        told[op.op] = {
            "names": [name, *TUNED_AS[op.op]],
            "runner": type(runner).__name__,
            "keys": len({keys[bucket] for bucket in BUCKETS}),
            "answers": [next(bucket for bucket in BUCKETS if keys[bucket] == keys[tokens]) for tokens in BETWEEN],
            "told apart": sorted(what for what, other in others.items() if key(made(other).call, 8) != keys[8]),
            "clashes": sorted(what for what, other in others.items() if key_problems([op, other], here)),
            "tactics": flashinfer_api.first_offer(case.call, 8),
            "asked": asked[-1],
        }
        if op.op == "trtllm_fp4_block_scale_moe":
            narrow = replace(op, options={**op.options, "hidden_out": "192"})
            told["narrow"] = [list(question(made(narrow).call, 8)[3][0].shape), key(made(narrow).call, 8) != keys[8]]
        if op.op == "trtllm_bf16_moe":
            told["routed"] = [key(partial(routed, case), 8) != keys[8], question(partial(routed, case), 8)[0]]
    print(json.dumps({**told, **cutlass_keys(here)}))


main()
