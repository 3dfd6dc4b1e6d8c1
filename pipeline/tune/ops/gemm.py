"""Matrix products: `out[tokens, n] = a[tokens, k] @ b[n, k].T`, with scales where operands are narrow.

    mm_bf16    bfloat16; AutoTuner's `bf16_gemm`. Before 0.7.4 the key of a cublaslt entry holds the real token count
               (`hits` = `exact`), and a cudnn entry cannot be found again (none is planned): the size of its
               workspace is in the key
    bmm_fp8    float8_e4m3fn, one scale per tensor, b column-major; `fp8_gemm`
    mm_fp4     nvfp4 (blocks of 16, e4m3 scales) or mxfp4 (blocks of 32, e8m0 scales); `fp4_gemm`
    mm_mxfp8   float8_e4m3fn, one e8m0 scale per 32 elements; `mxfp8_gemm`

One backend is called as a server calls it; several compete in FlashInfer's own dispatcher. No GPU has run mm_fp4 and
mm_mxfp8 yet (compute capability 10.0 and newer): held against the signatures of FlashInfer 0.6.16.post3 and 0.7.4.
Their block scales are all one, so that their interleaved layout cannot matter.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api

from . import OpSpec, capability, choose_backends
from .reference import (
    E4M3_ONE,
    E8M0_ONE,
    bits,
    dtype_of,
    fp8_excess,
    matmul_excess,
    nan,
    normal,
    seed_for,
    values,
)

_CORE = "flashinfer.jit.gemm.core"


class Gemm:
    """One product of a plan. The weight is drawn once, activations per token count."""

    BACKENDS: tuple[str, ...] = ()  # as FlashInfer orders its runners
    DEFAULT = "cutlass"
    OPERANDS = "bfloat16"

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        self.backends = choose_backends(op, self.BACKENDS, self.DEFAULT)
        self.mx = op.options.get("format") == "mxfp4"
        if self.OPERANDS:
            dtype_of(op.dtypes["a"], [self.OPERANDS])
            dtype_of(op.dtypes["b"], [self.OPERANDS])
        self.dtype = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self.n, self.k, self.device = op.shape["n"], op.shape["k"], device
        self.seed = seed_for(seed, op.op, self.n, self.k)
        self.weight = self.draw(self.n, self.seed)

    @property
    def backend(self) -> str:
        """The one backend, or FlashInfer's choice among its own."""
        return self.backends[0] if len(self.backends) == 1 else "auto"

    def draw(self, rows: int, seed: int) -> torch.Tensor:
        """`[rows, k]` values of an operand."""
        return normal((rows, self.k), dtype_of(self.OPERANDS), self.device, seed)

    def activation(self, tokens: int) -> torch.Tensor:
        """The values of `a`."""
        return self.draw(tokens, seed_for(self.seed, tokens))

    def empty(self, *shape: int) -> torch.Tensor:
        """An output in which everything that is not written shows."""
        return nan(shape, self.dtype, self.device)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        raise NotImplementedError

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return matmul_excess(out, self.activation(tokens), self.weight)


class Bf16(Gemm):
    """`mm_bf16`."""

    BACKENDS = ("cudnn", "cublaslt", "cutlass", "tgv", "tinygemm")
    DEFAULT = "cublaslt"

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        a, out = self.activation(tokens), self.empty(tokens, self.n)
        if len(self.backends) == 1:
            from flashinfer import mm_bf16

            mm_bf16(a, self.weight.T, out=out, out_dtype=self.dtype, backend=self.backend)
            return out
        dispatch, size = flashinfer_api.gemm_dispatch("bf16_gemm_sm100")
        room = flashinfer_api.scratch_buffer("mm_bf16_workspace", size, self.device)
        dispatch(a, self.weight.T, None, False, out, room, list(self.backends))
        return out


class Fp8(Gemm):
    """`bmm_fp8`, a batch of one."""

    BACKENDS = ("cutlass", "cublas", "cudnn")
    DEFAULT = "cublas"
    OPERANDS = "float8_e4m3fn"
    SCALES = (0.5, 0.25)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        a, b = self.activation(tokens)[None], self.weight.T[None]
        out = self.empty(1, tokens, self.n)
        scales = [torch.tensor(scale, dtype=torch.float32, device=self.device) for scale in self.SCALES]
        if len(self.backends) == 1:
            from flashinfer import bmm_fp8

            bmm_fp8(a, b, *scales, self.dtype, out=out, backend=self.backend)
            return out
        dispatch, size = flashinfer_api.gemm_dispatch("fp8_gemm_sm100")
        room = flashinfer_api.scratch_buffer("bmm_fp8_workspace", size, self.device)
        cutlass = "cutlass_sm12x" if capability(self.device) >= 120 else "cutlass_sm10x"
        names = [cutlass if name == "cutlass" else name for name in self.backends]
        dispatch(a, b, *scales, out, room, names)
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return fp8_excess(out[0], self.activation(tokens), self.weight, self.SCALES[0] * self.SCALES[1])


class Fp4(Gemm):
    """`mm_fp4`. alpha has the shape that vLLM and SGLang give it: none for nvfp4, (1,) for mxfp4."""

    BACKENDS = ("cudnn", "cutlass", "cute-dsl", "auto")
    OPERANDS = ""  # two to a byte

    def draw(self, rows: int, seed: int) -> torch.Tensor:
        """Random bytes of two values each."""
        return bits((rows, self.k // 2), self.device, seed)

    def _ones(self, rows: int) -> torch.Tensor:
        """Block scales of one, padded as the interleaved 128×4 layout is."""
        shape = (up(rows, 128), up(self.k // (32 if self.mx else 16), 4))
        return torch.full(shape, E8M0_ONE if self.mx else E4M3_ONE, dtype=torch.uint8, device=self.device)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        from flashinfer import mm_fp4

        out, alpha = self.empty(tokens, self.n), torch.ones((1,) if self.mx else (), device=self.device)
        mm_fp4(
            self.activation(tokens), self.weight.T, self._ones(tokens), self._ones(self.n).T, alpha, self.dtype, out,
            block_size=32 if self.mx else 16, backend=self.backend, use_nvfp4=not self.mx,
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return matmul_excess(out, values(self.activation(tokens)), values(self.weight))


class Mxfp8(Gemm):
    """`mm_mxfp8`."""

    BACKENDS = ("cutlass", "cudnn", "cute-dsl", "auto")
    OPERANDS = "float8_e4m3fn"

    def _ones(self, rows: int) -> torch.Tensor:
        size = up(rows, 128) * up(self.k // 32, 4)
        return torch.full((size,), E8M0_ONE, dtype=torch.uint8, device=self.device)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the product through the AutoTuner."""
        from flashinfer import mm_mxfp8

        out = self.empty(tokens, self.n)
        mm_mxfp8(
            self.activation(tokens), self.weight.T, self._ones(tokens), self._ones(self.n),
            out=out, out_dtype=self.dtype, backend=self.backend,
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        return fp8_excess(out, self.activation(tokens), self.weight, 1.0)


def up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _bf16_modules(op: OpPlan) -> list[Any]:
    named = {
        "cublaslt": (_CORE, "gen_mm_bf16_cublaslt_module"),
        "tinygemm": ("flashinfer.jit.tinygemm2", "gen_tinygemm2_module"),
        "cutlass": (_CORE, "gen_gemm_sm100_module_cutlass_bf16"),
    }
    return [flashinfer_api.jit_spec(*named[name]) for name in op.backends or ("cublaslt",) if name in named]


def _fp8_modules(op: OpPlan) -> list[Any]:
    """`gemm` holds the cuBLAS runner."""
    named = {"cublas": "gen_gemm_module", "cutlass": "gen_gemm_sm100_module_cutlass_fp8"}
    names = op.backends or ("cublas",)
    return [flashinfer_api.jit_spec(_CORE, made) for name, made in named.items() if name in names]


def _narrow_modules(kind: str, families: tuple[int, ...]) -> Any:  # noqa: ANN401 - a function
    """CUTLASS's module; cuDNN and CuTe DSL bring their own kernels."""

    def modules(op: OpPlan) -> list[Any]:
        if "cutlass" not in (op.backends or ("cutlass",)):
            return []
        here = capability(torch.device("cuda"))
        family = here if here in families else 120 if here >= 120 else 100
        return [flashinfer_api.jit_spec(_CORE, f"gen_gemm_sm{family}_module_cutlass_{kind}")]

    return modules


SPECS = {
    "mm_bf16": OpSpec(Bf16, _bf16_modules, capable=(80, 86, 87, 89, 90, 100, 103, 110, 120, 121)),
    "bmm_fp8": OpSpec(Fp8, _fp8_modules, capable=(89, 90, 100, 103, 107, 110, 120, 121)),
    "mm_fp4": OpSpec(Fp4, _narrow_modules("fp4", (103,)), capable=(100, 103, 107, 110, 120, 121)),
    "mm_mxfp8": OpSpec(Mxfp8, _narrow_modules("mxfp8", ()), capable=(100, 103, 110, 120, 121)),
}
