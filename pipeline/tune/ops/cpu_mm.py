"""`cpu_mm`: a matrix product on the CPU in several ways that really differ, for machines without a GPU.

    out[tokens, n] = a[tokens, k] @ b[n, k].T        dtypes of a, b, out: all float32 or all bfloat16

A tactic is `(path, layout, rows, columns, threads)`:

    path     `blas` the library behind torch.mm with oneDNN off; bfloat16 only: `onednn` the same product through
             oneDNN, `upcast` converted to float32 and back
    layout   memory format of the weight: `nk` as given, `kn` a transposed copy that is made once per weight
    rows, columns   tile sizes of the output; 0 is the whole side
    threads  OpenMP threads for this tactic, set and put back around it (a rank starts with one)

Whole products and tiled ones are two runners, so that the choice of a runner is exercised too.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import torch

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api, hooks

from . import OpSpec
from .reference import dtype_of, matmul_excess, nan, normal, seed_for

_at = flashinfer_api.load()

Tactic = tuple[str, str, int, int, int]


class CpuOpInvalid(UsageError):
    """The plan asks for a matrix product that this adapter does not do."""


def cpu_threads() -> int:
    """How many processors this process may use; part of the environment record."""
    return len(os.sched_getaffinity(0))


def _thread_counts() -> list[int]:
    return sorted({1, min(cpu_threads(), 8)})


def _transposed(kept: dict[str, Any], weight: torch.Tensor) -> torch.Tensor:
    """`weight.T` as a contiguous copy, made once per weight; `kept` remembers the last one only."""
    known = kept.get("weight")
    if known is None or known() is not weight or kept["version"] != weight._version:
        kept.update(weight=weakref.ref(weight), version=weight._version, copy=weight.T.contiguous())
    copy: torch.Tensor = kept["copy"]
    return copy


def _onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())


def _product(path: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """One tile: `out = a @ b` with `b` as `[k, n]`, in any memory format."""
    if path == "upcast":
        out.copy_(a.float() @ b.float())
    else:
        # Writing straight into a tile would need a contiguous one; torch.mm copies where it must.
        torch.mm(a, b, out=out)


def _run(tactic: Tactic, kept: dict[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    path, layout, rows, columns, threads = tactic
    right = _transposed(kept, b) if layout == "kn" else b.T
    before, enabled = torch.get_num_threads(), torch.backends.mkldnn.enabled
    try:
        torch.set_num_threads(threads)
        torch._C._set_mkldnn_enabled(path == "onednn")
        height, width = rows or max(1, out.shape[0]), columns or out.shape[1]
        for top in range(0, out.shape[0], height):
            for left in range(0, out.shape[1], width):
                tile = out[top : top + height, left : left + width]
                _product(path, a[top : top + height], right[:, left : left + width], tile)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
        torch.set_num_threads(before)


class CpuRunner(_at.TunableRunner):  # type: ignore[misc, name-defined]
    """Shared by both runners: dtypes in the key, the weight's copy, the default tactic."""

    def __init__(self) -> None:
        self.weight_cache: dict[str, Any] = {}  # FlashInfer leaves names that end in _cache out of a runner's identity

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """The dtypes, which shapes do not tell."""
        return tuple(str(tensor.dtype) for tensor in inputs)

    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = -1,  # noqa: ANN401 - FlashInfer's
        do_preparation: bool = False,
        **_: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Write the product into `inputs[2]` and return it. Tactic -1 is torch.mm as it comes."""
        a, b, out = inputs
        if do_preparation:
            _transposed(self.weight_cache, b)
        elif tactic == -1:
            torch.mm(a, b.T, out=out)
        else:
            _run(tuple(tactic), self.weight_cache, a, b, out)
        if not do_preparation:
            hooks.at("cpu_mm", tactic, a, b, out)
        return out


class CpuWholeRunner(CpuRunner):
    """The whole product in one call."""

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[Tactic]:  # noqa: ANN401, ARG002
        """Paths by memory formats by thread counts."""
        narrow = inputs[0].dtype == torch.bfloat16
        paths = ["blas", *(["onednn"] if _onednn() else []), "upcast"] if narrow else ["blas"]
        return [
            (path, layout, 0, 0, threads)
            for path in paths
            for layout in ("nk", "kn")
            for threads in _thread_counts()
            # torch's own bfloat16 loop over a transposed weight is fifty times slower: never worth timing
            if not (narrow and path == "blas" and layout == "kn")
        ]


class CpuTiledRunner(CpuRunner):
    """The product tile by tile, where there is more than one tile."""

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[Tactic]:  # noqa: ANN401, ARG002
        """Row tiles and column tiles over the transposed copy, on one thread."""
        tokens, n = inputs[0].shape[0], inputs[1].shape[0]
        path = "onednn" if inputs[0].dtype == torch.bfloat16 and _onednn() else "blas"
        rows = [(path, "kn", rows, 0, 1) for rows in (16, 64) if rows < tokens]
        columns = [(path, "kn", 0, columns, 1) for columns in (128, 512) if columns < n]
        return [*rows, *columns]


_RUNNERS = (CpuWholeRunner(), CpuTiledRunner())


class CpuMatmul:
    """One `cpu_mm` of a plan. The weight is drawn once, activations per token count."""

    bucket_only = True  # a tactic is the same program at every token count

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        names = {op.dtypes.get(name) for name in ("a", "b", "out")}
        if len(names) != 1 or names - {"float32", "bfloat16"} or min(op.shape.get("n", 0), op.shape.get("k", 0)) < 1:
            raise CpuOpInvalid(
                f"{op.name}: cpu_mm takes n and k, and one dtype for a, b and out (float32 or bfloat16)",
                hint="make the plan again with `pipeline plan`",
            )
        self._dtype = dtype_of(op.dtypes["a"])
        self._n, self._k = op.shape["n"], op.shape["k"]
        self._device, self._seed = device, seed_for(seed, "cpu_mm", self._n, self._k, self._dtype)
        self._weight = normal((self._n, self._k), self._dtype, device, self._seed)
        # The base config's own bucket is never used: the tuner always sets the plan's buckets.
        buckets = (1,)
        self._config = _at.TuningConfig(
            dynamic_tensor_specs=(_at.DynamicTensorSpec((0,), (0,), buckets, _at.make_bucket_mapper(buckets)),),
            constraint_specs=(_at.ConstraintSpec(2, 0, _rows_of_first),),
        )

    def _inputs(self, tokens: int) -> list[torch.Tensor]:
        a = normal((tokens, self._k), self._dtype, self._device, seed_for(self._seed, tokens))
        return [a, self._weight, nan((tokens, self._n), self._dtype, self._device)]

    def call(self, tokens: int) -> torch.Tensor:
        """Let the AutoTuner choose and run its choice. The output starts as NaN: what is not written shows."""
        inputs = self._inputs(tokens)
        runner, tactic = _at.AutoTuner.get().choose_one("cpu_mm", list(_RUNNERS), self._config, inputs)
        out: torch.Tensor = runner(inputs, tactic=tactic)
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the product in float64."""
        a, b, _ = self._inputs(tokens)
        return matmul_excess(out, a, b)


def _rows_of_first(shapes: Any) -> int:  # noqa: ANN401 - FlashInfer's
    """The output has as many rows as the activation; a named function, so that equal configs compare equal."""
    return int(shapes[0][0])


def _build(op: OpPlan, device: torch.device, seed: int) -> CpuMatmul:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing oneDNN's flags speaks of Intel GPUs
        return CpuMatmul(op, device, seed)


SPECS = {"cpu_mm": OpSpec(_build, device="cpu")}
