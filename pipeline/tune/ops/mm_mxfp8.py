"""`mm_mxfp8`: a product of fp8 operands with one e8m0 scale per 32 elements, known to the AutoTuner as `mxfp8_gemm`.

Compute capability 10.0 and newer: no GPU has run this adapter yet. Held against the signatures of FlashInfer
0.6.16.post3 and 0.7.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import dtype_of, fp8_excess, need_device, normal, seed_for

from .cuda import capability, choose_backends, nan, need_capability, spec
from .fp4 import E8M0_ONE, up
from .question import offered

CUSTOM_OPS = ("mxfp8_gemm",)
DEVICE = "cuda"
CAPABLE = (100, 103, 110, 120, 121)
BACKENDS = ("cutlass", "cudnn", "cute-dsl", "auto")


def modules(op: OpPlan) -> list[Any]:
    """The CUTLASS module; cuDNN and CuTe DSL bring their own kernels."""
    if "cutlass" not in (op.backends or ("cutlass",)):
        return []
    family = 120 if capability(torch.device("cuda")) >= 120 else 100
    return [spec("flashinfer.jit.gemm.core", f"gen_gemm_sm{family}_module_cutlass_mxfp8")]


class Mxfp8Product:
    """One product of a plan: random fp8 operands, all block scales one, so that their layout cannot matter."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        names = choose_backends(op, BACKENDS, "cutlass")
        self._backend = names[0] if len(names) == 1 else "auto"
        self._out = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self._n, self._k, self._device = op.shape["n"], op.shape["k"], device
        self._seed = seed_for(seed, "mm_mxfp8", self._n, self._k)
        self._weight = normal((self._n, self._k), torch.float8_e4m3fn, device, self._seed)

    def _ones(self, rows: int) -> torch.Tensor:
        size = up(rows, 128) * up(self._k // 32, 4)
        return torch.full((size,), E8M0_ONE, dtype=torch.uint8, device=self._device)

    def _activation(self, tokens: int) -> torch.Tensor:
        return normal((tokens, self._k), torch.float8_e4m3fn, self._device, seed_for(self._seed, tokens))

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        from flashinfer import mm_mxfp8

        out = nan((tokens, self._n), self._out, self._device)
        mm_mxfp8(
            self._activation(tokens), self._weight.T, self._ones(tokens), self._ones(self._n),
            out=out, out_dtype=self._out, backend=self._backend,
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return fp8_excess(out, self._activation(tokens), self._weight, 1.0)

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What each runner offers."""
        return offered(self, tokens)


def make(op: OpPlan, device: torch.device, seed: int) -> Mxfp8Product:
    """Prepare a product; raise `OpNotHere` or `DtypeUnknown`."""
    return Mxfp8Product(op, device, seed)
