"""`mm_fp4`: a product of four-bit operands with block scales, known to the AutoTuner as `fp4_gemm`.

nvfp4 (blocks of 16, e4m3 scales) or mxfp4 (blocks of 32, e8m0 scales; not with CUTLASS). Shapes are part of the key,
so alpha has the one that vLLM and SGLang give it: none for nvfp4, as a product of two scales, (1,) for mxfp4. Compute
capability 10.0 and newer: no GPU has run this adapter yet. Held against the signatures of FlashInfer 0.6.16.post3 and
0.7.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import dtype_of, matmul_excess, need_device, seed_for

from .cuda import choose_backends, nan, need_capability, spec
from .fp4 import E4M3_ONE, E8M0_ONE, bits, up, values
from .question import offered

CUSTOM_OPS = ("fp4_gemm",)
DEVICE = "cuda"
CAPABLE = (100, 103, 107, 110, 120, 121)
BACKENDS = ("cudnn", "cutlass", "cute-dsl", "auto")


def modules(op: OpPlan) -> list[Any]:
    """The CUTLASS module; cuDNN and CuTe DSL bring their own kernels."""
    if "cutlass" not in (op.backends or ("cutlass",)):
        return []
    from .cuda import capability

    here = capability(torch.device("cuda"))
    family = 103 if here == 103 else 120 if here >= 120 else 100
    return [spec("flashinfer.jit.gemm.core", f"gen_gemm_sm{family}_module_cutlass_fp4")]


class Fp4Product:
    """One product of a plan: random four-bit operands, all block scales one."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        names = choose_backends(op, BACKENDS, "cutlass")
        self._backend = names[0] if len(names) == 1 else "auto"
        self._mx = op.options.get("format") == "mxfp4"
        self._block = 32 if self._mx else 16
        self._out = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self._n, self._k, self._device = op.shape["n"], op.shape["k"], device
        self._seed = seed_for(seed, "mm_fp4", self._n, self._k)
        self._weight = bits((self._n, self._k // 2), device, self._seed)

    def _ones(self, rows: int) -> torch.Tensor:
        """Block scales of one, padded as the interleaved 128×4 layout is."""
        shape = (up(rows, 128), up(self._k // self._block, 4))
        value = E8M0_ONE if self._mx else E4M3_ONE
        return torch.full(shape, value, dtype=torch.uint8, device=self._device)

    def _activation(self, tokens: int) -> torch.Tensor:
        return bits((tokens, self._k // 2), self._device, seed_for(self._seed, tokens))

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        from flashinfer import mm_fp4

        out = nan((tokens, self._n), self._out, self._device)
        alpha = torch.ones((1,) if self._mx else (), dtype=torch.float32, device=self._device)
        mm_fp4(
            self._activation(tokens), self._weight.T, self._ones(tokens), self._ones(self._n).T,
            alpha, self._out, out, block_size=self._block, backend=self._backend, use_nvfp4=not self._mx,
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return matmul_excess(out, values(self._activation(tokens)), values(self._weight))

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What each runner offers."""
        return offered(self, tokens)


def make(op: OpPlan, device: torch.device, seed: int) -> Fp4Product:
    """Prepare a product; raise `OpNotHere` or `DtypeUnknown`."""
    return Fp4Product(op, device, seed)
