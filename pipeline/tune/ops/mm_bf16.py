"""`mm_bf16`: FlashInfer's bfloat16 product, known to its AutoTuner as `bf16_gemm`.

    out[tokens, n] = a[tokens, k] @ b[n, k].T        a and b bfloat16; out bfloat16 or float16

Backends on compute capability 9.0: cublaslt, tinygemm (n a multiple of 16), cudnn; on 10.0 also cutlass and tgv. One
backend is called as a server calls it; several compete in FlashInfer's own dispatcher, which `mm_bf16` calls too.

Before 0.7.4 the key of a cublaslt entry holds the real token count (`hits` = `exact`), and a cudnn entry cannot be
found again at all: cuDNN resizes the workspace, whose size is in the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.features import BF16_CUDNN_FOUND
from pipeline.tune import flashinfer_api
from pipeline.tune.inputs import dtype_of, matmul_excess, need_device, normal, seed_for

from .cuda import choose_backends, nan, need_capability, need_version, spec, workspace
from .question import offered

CUSTOM_OPS = ("bf16_gemm",)
DEVICE = "cuda"
CAPABLE = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
BACKENDS = ("cudnn", "cublaslt", "cutlass", "tgv", "tinygemm")  # as FlashInfer orders its runners

_MODULES = {
    "cublaslt": ("flashinfer.jit.gemm.core", "gen_mm_bf16_cublaslt_module"),
    "tinygemm": ("flashinfer.jit.tinygemm2", "gen_tinygemm2_module"),
    "cutlass": ("flashinfer.jit.gemm.core", "gen_gemm_sm100_module_cutlass_bf16"),
}


def modules(op: OpPlan) -> list[Any]:
    """The JIT modules that the op loads."""
    return [spec(*_MODULES[name]) for name in op.backends or ("cublaslt",) if name in _MODULES]


class Bf16Product:
    """One product of a plan. The weight is drawn once, activations per token count."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        self._backends = choose_backends(op, BACKENDS, "cublaslt")
        if "cudnn" in self._backends:
            need_version(op, "cuDNN's entries of mm_bf16 cannot be found again", BF16_CUDNN_FOUND)
        dtype_of(op.dtypes["a"], ["bfloat16"])
        dtype_of(op.dtypes["b"], ["bfloat16"])
        self._out = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self._n, self._k, self._device = op.shape["n"], op.shape["k"], device
        self._seed = seed_for(seed, "mm_bf16", self._n, self._k)
        self._weight = normal((self._n, self._k), torch.bfloat16, device, self._seed)

    def _activation(self, tokens: int) -> torch.Tensor:
        return normal((tokens, self._k), torch.bfloat16, self._device, seed_for(self._seed, tokens))

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        a, out = self._activation(tokens), nan((tokens, self._n), self._out, self._device)
        if len(self._backends) == 1:
            from flashinfer import mm_bf16

            mm_bf16(a, self._weight.T, out=out, out_dtype=self._out, backend=self._backends[0])
            return out
        dispatch, size = flashinfer_api.gemm_dispatch("bf16_gemm_sm100")
        room = workspace("mm_bf16_workspace", size, self._device)
        dispatch(a, self._weight.T, None, False, out, room, list(self._backends))
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return matmul_excess(out, self._activation(tokens), self._weight)

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What each runner offers."""
        return offered(self, tokens)


def make(op: OpPlan, device: torch.device, seed: int) -> Bf16Product:
    """Prepare a product; raise `OpNotHere` or `DtypeUnknown`."""
    return Bf16Product(op, device, seed)
