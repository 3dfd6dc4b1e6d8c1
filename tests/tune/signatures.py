"""Run in the tuner's interpreter: every GPU adapter's call held against FlashInfer's real signature, and its reference.

No GPU: the functions are replaced by ones that bind their arguments to the real signature. The references run on the
CPU, against a plain float32 computation of the same thing.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import flashinfer
import torch
from flashinfer import fused_moe

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api
from pipeline.tune.ops import adapter_of, cuda
from pipeline.tune.ops.fp4 import values
from pipeline.tune.ops.moe import route, sizes

CPU = torch.device("cpu")
MOE = {"experts": 8, "local_experts": 4, "hidden": 256, "intermediate": 128, "top_k": 2, "tp": 1, "ep": 2}
BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
FP8 = {"a": "float8_e4m3fn", "b": "float8_e4m3fn", "out": "bfloat16"}
FP4 = {"a": "uint8", "b": "uint8", "out": "bfloat16"}
GEMM = {"n": 64, "k": 96}
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
           options={"format": "mxfp4", "routing_method": "renormalize"}),
]  # fmt: skip
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
    s = sizes(op)
    chosen, share = route(op, tokens, CPU, case._seed)
    if op.op.startswith("trtllm"):
        share = torch.full_like(share, 1 / s.top_k)
    x = case._activation(tokens)
    x = values(x) if x.dtype == torch.uint8 else x.float()
    up, down = case._weights
    if up.dtype == torch.uint8:
        up, down = values(up), values(down)
    if up.dtype != torch.bfloat16:
        up, down = up.float() * case._scales[0], down.float() * case._scales[1]
    out = torch.zeros(tokens, s.hidden)
    for token in range(tokens):
        for k in range(s.top_k):
            expert = int(chosen[token, k]) - s.first
            if 0 <= expert < s.local:
                first = up[expert].float() @ x[token]
                h = first[: s.inner] * torch.nn.functional.silu(first[s.inner :])
                out[token] += share[token, k] * (down[expert].float() @ h)
    return out


def expected(case: Any, op: OpPlan, tokens: int) -> torch.Tensor:
    """What a right kernel would return."""
    if "experts" in op.shape:
        return layer(case, op, tokens).bfloat16()
    a, b = case._activation(tokens), case._weight
    a, b = (values(t) if t.dtype == torch.uint8 else t.float() for t in (a, b))
    scale = 0.5 * 0.25 if op.op == "bmm_fp8" else 1.0
    out = (a @ b.T * scale).bfloat16()
    return out[None] if op.op == "bmm_fp8" else out


def main() -> None:
    """One line of JSON: for each adapter what it called with, and how far right and wrong outputs are."""
    flashinfer_api.load()
    told = {}
    for op in PLANS:
        module: Any = adapter_of(op)
        module.need_capability = lambda *_: None
        heard = listen(op.op)
        case = module.make(op, CPU, 3)
        case.call(8)
        right = expected(case, op, 8)
        wrong = right.clone()
        wrong[..., 0] += 0.3 * right.float().abs().max().bfloat16()
        told[op.name] = {
            "op": op.op,
            "arguments": sorted(heard),
            "right": case.excess(8, right),
            "wrong": case.excess(8, wrong),
            "unwritten": case.excess(8, torch.full_like(right, float("nan"))),
        }
    assert cuda.release(flashinfer_api.version()) >= (0, 6, 16)
    print(json.dumps(told))


main()
