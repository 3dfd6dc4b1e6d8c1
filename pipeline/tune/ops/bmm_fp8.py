"""`bmm_fp8`: FlashInfer's fp8 product with one scale per tensor, known to its AutoTuner as `fp8_gemm`.

    out[1, tokens, n] = (a[1, tokens, k] @ b[1, k, n]) · scale_a · scale_b

a and b are float8_e4m3fn, b is column-major: a view of a weight [n, k]. Backends on compute capability 9.0: cublas,
cudnn; from 10.0 on also cutlass. Keys are sound in every version from 0.6.13 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api
from pipeline.tune.inputs import dtype_of, fp8_excess, need_device, normal, seed_for

from .cuda import capability, choose_backends, nan, need_capability, spec, workspace
from .question import offered

CUSTOM_OPS = ("fp8_gemm",)
DEVICE = "cuda"
CAPABLE = (89, 90, 100, 103, 107, 110, 120, 121)
BACKENDS = ("cutlass", "cublas", "cudnn")  # as FlashInfer orders its runners

_SCALES = (0.5, 0.25)


def modules(op: OpPlan) -> list[Any]:
    """The JIT modules that the op loads. `gemm` holds the cuBLAS runner."""
    names = op.backends or ("cublas",)
    found = [spec("flashinfer.jit.gemm.core", "gen_gemm_module")] if "cublas" in names else []
    if "cutlass" in names:
        found.append(spec("flashinfer.jit.gemm.core", "gen_gemm_sm100_module_cutlass_fp8"))
    return found


class Fp8Product:
    """One product of a plan. The weight is drawn once, activations per token count."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        self._backends = choose_backends(op, BACKENDS, "cublas")
        dtype_of(op.dtypes["a"], ["float8_e4m3fn"])
        dtype_of(op.dtypes["b"], ["float8_e4m3fn"])
        self._out = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self._n, self._k, self._device = op.shape["n"], op.shape["k"], device
        self._seed = seed_for(seed, "bmm_fp8", self._n, self._k)
        self._weight = normal((self._n, self._k), torch.float8_e4m3fn, device, self._seed)
        self._scales = [torch.tensor(scale, dtype=torch.float32, device=device) for scale in _SCALES]

    def _activation(self, tokens: int) -> torch.Tensor:
        return normal((tokens, self._k), torch.float8_e4m3fn, self._device, seed_for(self._seed, tokens))

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        a, b = self._activation(tokens)[None], self._weight.T[None]
        out = nan((1, tokens, self._n), self._out, self._device)
        if len(self._backends) == 1:
            from flashinfer import bmm_fp8

            bmm_fp8(a, b, *self._scales, self._out, out=out, backend=self._backends[0])
            return out
        dispatch, size = flashinfer_api.gemm_dispatch("fp8_gemm_sm100")
        room = workspace("bmm_fp8_workspace", size, self._device)
        cutlass = "cutlass_sm12x" if capability(self._device) >= 120 else "cutlass_sm10x"
        names = [cutlass if name == "cutlass" else name for name in self._backends]
        dispatch(a, b, *self._scales, out, room, names)
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return fp8_excess(out[0], self._activation(tokens), self._weight, _SCALES[0] * _SCALES[1])

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What each runner offers."""
        return offered(self, tokens)


def make(op: OpPlan, device: torch.device, seed: int) -> Fp8Product:
    """Prepare a product; raise `OpNotHere` or `DtypeUnknown`."""
    return Fp8Product(op, device, seed)
