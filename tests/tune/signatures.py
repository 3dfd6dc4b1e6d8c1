"""Run in the tuner's interpreter: every GPU adapter's call held against FlashInfer's real signature, and its reference.

No GPU: the functions are replaced by ones that bind their arguments to the real signature. The references run on the
CPU, against a plain float32 computation of the same thing.
"""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import replace
from typing import Any

import flashinfer
import moe_kernel
import torch
from flashinfer import fused_moe
from flashinfer.autotuner import AutoTuner
from flashinfer.gemm import gemm_base

from pipeline.cache.otherkeys import other_keys, other_shapes
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.flashinfer.ops import BACKENDS
from pipeline.tune import flashinfer_api, jit, ops, session
from pipeline.tune.ops import cutlass, gemm, spec_of
from pipeline.tune.ops.reference import values

CPU = torch.device("cpu")
HERE = [90]
ops.capability = cutlass.capability = gemm.capability = lambda _: HERE[0]
MOE = {"experts": 8, "local_experts": 4, "hidden": 256, "intermediate": 128, "top_k": 2, "tp": 1, "ep": 2}
BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
FP8 = {"a": "float8_e4m3fn", "b": "float8_e4m3fn", "out": "bfloat16"}
FP4 = {"a": "uint8", "b": "uint8", "out": "bfloat16"}
GEMM = {"n": 64, "k": 96}
MXFP4 = {"format": "mxfp4", "activation": "swiglu_oai", "bias": "true"}
PLANS = [
    OpPlan("a", "mm_bf16", GEMM, BF16, (8,), ("cublaslt",)),
    OpPlan("b", "bmm_fp8", GEMM, FP8, (8,)),
    OpPlan("c", "mm_fp4", GEMM, FP4, (8,), options={"format": "nvfp4"}),
    OpPlan("d", "mm_mxfp8", GEMM, FP8, (8,)),
    OpPlan("e", "cutlass_fused_moe", MOE, BF16, (8,),
           options={"routing": "round_robin"}),
    OpPlan("f", "cutlass_fused_moe", MOE, FP8, (8,)),
    OpPlan("g", "trtllm_fp8_block_scale_moe", MOE, FP8, (8,),
           options={"format": "fp8_block", "routing_method": "deepseek_v3", "n_group": "4", "topk_group": "2"}),
    OpPlan("h", "trtllm_fp4_block_scale_moe", MOE, FP4, (8,),
           options={"format": "nvfp4", "routing_method": "renormalize"}),
    OpPlan("i", "trtllm_fp4_block_scale_moe", MOE, {"a": "bfloat16", "b": "uint8", "out": "bfloat16"}, (8,),
           options={"format": "mxfp4", "routing_method": "renormalize", "hidden_out": "192"}),
    OpPlan("j", "trtllm_bf16_moe", MOE, BF16, (8,), options={"routing_method": "renormalize_naive"}),
    OpPlan("k", "trtllm_fp8_per_tensor_scale_moe", {**MOE, "local_experts": 8, "ep": 1}, FP8, (8,),
           options={"routing_method": "deepseek_v3", "n_group": "4", "topk_group": "2"}),
    OpPlan("l", "cutlass_fused_moe", MOE, {**BF16, "b": "uint8"}, (8,), options={"routing": "round_robin", **MXFP4}),
    OpPlan("m", "cutlass_fused_moe", {**MOE, "local_experts": 8, "tp": 2, "ep": 1}, {**BF16, "b": "uint8"}, (8,),
           options=MXFP4),
]  # fmt: skip
SECOND = ("m",)  # called by the second of two ranks
PLAIN_MOE = ("trtllm_bf16_moe", "trtllm_fp8_per_tensor_scale_moe")
REAL: dict[str, Any] = {}
WHERE = dict.fromkeys(("mm_bf16", "bmm_fp8", "mm_fp4", "mm_mxfp8"), flashinfer)


def listen(op: str) -> dict[str, Any]:
    """Replace a function by one that binds what it is given, and return where it will put that."""
    owner, heard = WHERE.get(op, fused_moe), {}
    real = REAL.setdefault(op, getattr(owner, op))  # the same op may come twice
    signature = inspect.signature(real)

    def called(*args: Any, **kwargs: Any) -> torch.Tensor:
        heard.update(signature.bind(*args, **kwargs).arguments)
        return torch.zeros(8, 1)

    setattr(owner, op, called)
    return heard


def layer(case: Any, op: OpPlan, tokens: int) -> torch.Tensor:
    """A MoE layer, token by token, in float32."""
    s = case.sizes
    chosen, share = case.routed(tokens)
    if op.op.startswith("trtllm"):
        share = torch.full_like(share, 1 / s.top_k)
    x = case.activation(tokens)
    x = values(x) if x.dtype == torch.uint8 else x.float()
    up, down = case.weights
    out = torch.zeros(tokens, len(down[0]))
    for token in range(tokens):
        for k in range(s.top_k):
            expert = int(chosen[token, k]) - s.first
            if 0 <= expert < s.local:
                first = up[expert] @ x[token]
                h = first[: s.inner] * torch.nn.functional.silu(first[s.inner :])
                out[token] += share[token, k] * (down[expert] @ h)
    return out


def kernel(op: OpPlan, heard: dict[str, Any]) -> torch.Tensor | None:
    """What a right kernel would make of the arguments of a call; None where no such kernel is modelled."""
    if op.op in PLAIN_MOE:
        return moe_kernel.run(heard)
    return moe_kernel.run_cutlass_mxfp4(heard) if op.options.get("activation") == "swiglu_oai" else None


def expected(case: Any, op: OpPlan, tokens: int) -> torch.Tensor:
    """What a right kernel would return."""
    if "experts" in op.shape:
        return layer(case, op, tokens).bfloat16()
    a, b = case.activation(tokens), case.weight
    a, b = (values(t) if t.dtype == torch.uint8 else t.float() for t in (a, b))
    scale = 0.5 * 0.25 if op.op == "bmm_fp8" else 1.0
    out = (a @ b.T * scale).bfloat16()
    return out[None] if op.op == "bmm_fp8" else out


class FakeSpec:
    """As much of a JitSpec as building looks at."""

    name, is_aot = "fake", False

    def get_object_paths(self) -> list[Any]:
        return []

    def build(self, **_: Any) -> None:
        raise RuntimeError("Ninja build failed.\nnvcc: not found")


class FakeSteps:
    """Steps that are kept."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, step: str, detail: str = "") -> None:
        self.said.append(step)


def failed_build() -> list[str]:
    """What is said when ninja fails on one rank."""
    steps: Any = FakeSteps()
    words = jit._build([FakeSpec()], steps)
    try:
        jit._all_well(["", words])
    except jit.JitFailed as error:
        return [error.message, *error.details, *steps.said]
    return []


def devices() -> list[str]:
    """The device of rank 1 of 2 on one GPU: refused where ranks tune, shared where they replay."""
    plan = Plan("m", "cuda", "90a", "x", Layout(), ())
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _: None
    try:
        session.take_device(plan)
    except session.TooFewGpus as error:
        refused = error.message
    taken = session.take_device(plan, share_gpu=True)
    return [refused, str(taken)]


def needed() -> list[str]:
    """The private names of FlashInfer that ops need, each looked for: JIT modules for every GPU and backend, dispatchers."""
    found, real = set(), flashinfer_api.jit_spec
    flashinfer_api.jit_spec = lambda module, name, *_: found.add(flashinfer_api._named(module, name).__name__)
    for HERE[0] in (90, 100, 103, 120):
        for op in PLANS:
            try:
                spec_of(op).modules(replace(op, backends=tuple(BACKENDS.get(op.op, ()))))
            except flashinfer_api.FlashInferMoved as error:
                found.add(error.message)
    for name in ("bf16_gemm_sm100", "fp8_gemm_sm100"):
        found.add(flashinfer_api.gemm_dispatch(name)[0].__name__)
    HERE[0], flashinfer_api.jit_spec = 90, real
    return sorted(found)


def refused() -> list[str]:
    """What is said of mxfp4 layers that this op cannot run."""
    op, told = next(plan for plan in PLANS if plan.name == "l"), []
    odd = (
        (90, replace(op, shape={**op.shape, "hidden": 192})),
        (90, replace(op, dtypes={**op.dtypes, "a": "float16"})),
        (90, replace(op, options={"format": "mxfp4"})),
        (90, replace(op, options={**MXFP4, "format": "fp8_block"})),
        (100, op),
        (90, replace(op, op="mm_bf16", backends=("cutlas",))),
    )
    for HERE[0], plan in odd:
        try:
            spec_of(plan).make(plan, CPU, 3)
        except ops.OpNotHere as error:
            told.append(error.message)
    HERE[0] = 90
    return told


def other_fp8_keys() -> list[Any]:
    """The keys of callers of bmm_fp8 whose scales have another shape: ours, FlashInfer's, and of the shapes asked for."""

    def shapes(scale: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return ((1, 7, 64), (1, 64, 32), scale, scale, (1, 7, 32), (32 << 20,))

    def key(shapes: tuple[tuple[int, ...], ...]) -> str:
        extras = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
        config = gemm_base._FP8_GEMM_SM100_TUNING_CONFIG
        return str(AutoTuner._get_cache_key("fp8_gemm", object(), shapes, config, extras).file_key)

    asked = key(other_shapes(shapes(())))
    return [other_keys(key(shapes(()))), [key(shapes((1,)))], [asked], other_keys(asked)]


def main() -> None:
    """One line of JSON: for each adapter what it called with, and how far right and wrong outputs are."""
    flashinfer_api.load()
    interleaved = inspect.signature(fused_moe.interleave_moe_weights_for_sm90_mixed_gemm)
    fused_moe.interleave_moe_weights_for_sm90_mixed_gemm = lambda *args: moe_kernel.laid(*interleaved.bind(*args).args)
    told = {}
    for op in PLANS:
        os.environ["RANK"] = "1" if op.name in SECOND else "0"
        heard = listen(op.op)
        case: Any = spec_of(op).build(op, CPU, 3)
        case.call(8)
        called = kernel(op, heard)
        right = called if called is not None and "format" in op.options else expected(case, op, 8)
        wrong = right.clone()
        wrong[..., 0] += 0.3 * right.float().abs().max().bfloat16()
        told[op.name] = {
            "op": op.op,
            "arguments": sorted(heard),
            "shapes": {name: list(v.shape) for name, v in heard.items() if isinstance(v, torch.Tensor)},
            "layout": [heard.get("use_shuffled_weight"), heard.get("weight_layout")],
            "logits": str(heard["routing_logits"].dtype) if "routing_logits" in heard else "",
            "right": case.excess(8, right),
            "wrong": case.excess(8, wrong),
            "as called": 0.0 if called is None else case.excess(8, called),
            "mixed up": case.excess(8, right.roll(1, 0)),
            "unwritten": case.excess(8, torch.full_like(right, float("nan"))),
        }
    told["modules"] = sorted(jit.specs_of(Plan("m", "cuda", "90a", "x", Layout(), tuple(PLANS[:2]))))
    told["failed build"] = failed_build()
    told["devices"] = devices()
    told["needed"], told["refused"], told["other keys"] = needed(), refused(), other_fp8_keys()
    print(json.dumps(told))


main()
