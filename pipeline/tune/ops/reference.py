"""Random inputs from a recorded seed, dtypes by name, and how far an output may be from its reference.

Four-bit values are drawn as bits, two to a byte, the first in the low half: tests of a product need no quantized model.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Protocol

import torch

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import UsageError

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "int32", "uint8")
}

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by its three low bits; the fourth is the sign
E4M3_ONE, E8M0_ONE = 0x38, 127  # one, by the bits of a block scale

# Rows that are compared: all of them up to this many, else as many spread evenly, first and last included. Fewer where
# a device has no memory for the reference of so many.
_ROWS = (256, 32, 4)
_rows = contextvars.ContextVar("rows", default=_ROWS[0])


def rows_compared() -> int:
    """How many rows of an output are compared at most."""
    return _rows.get()


def spread(rows: int, device: torch.device) -> torch.Tensor:
    """The rows of so many that are compared, ascending."""
    many = min(rows, rows_compared())
    return torch.linspace(0, rows - 1, many, device=device, dtype=torch.float64).round().long()


class _Checked(Protocol):
    def excess(self, tokens: int, out: torch.Tensor) -> float: ...


def excess_of(case: _Checked, tokens: int, out: torch.Tensor) -> tuple[float, str]:
    """How far an output is from its reference, and what is to be said about how that was found.

    Memory that runs out in the reference is no fault of the tactic: fewer rows are compared, in the end none.
    """
    for rows in _ROWS:
        token = _rows.set(rows)
        try:
            found = case.excess(tokens, out)
        except (torch.cuda.OutOfMemoryError, MemoryError):
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            continue
        finally:
            _rows.reset(token)
        return found, "" if rows == _ROWS[0] else f"{rows} rows were compared, for want of memory for the reference"
    return 0.0, "not checked: there was no memory for the reference"


class DtypeUnknown(UsageError):
    """The plan names a dtype that the op cannot use."""


def dtype_of(name: str, allowed: Sequence[str] = ()) -> torch.dtype:
    """The torch dtype of a plan's name; raise `DtypeUnknown` for one that is not among `allowed`."""
    names = tuple(allowed) or tuple(_DTYPES)
    if name not in names:
        raise DtypeUnknown(f"dtype {name!r} is not one of {', '.join(names)}", hint="make the plan again")
    return _DTYPES[name]


def seed_for(seed: int, *what: object) -> int:
    """A seed of 63 bits for one tensor: the plan's seed mixed with what the tensor is for."""
    return int(sha256_json([seed, *map(str, what)])[:16], 16) >> 1


def normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Standard normal values, the same for the same seed on every rank with the same kind of device; drawn there."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device=device).to(dtype)


def bits(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Random bytes of two four-bit values each; `shape` counts bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)


def values(packed: torch.Tensor) -> torch.Tensor:
    """The float32 values of packed bytes, twice as many along the last dimension."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1)
    return table[halves.long()].flatten(-2)


def nan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output in which everything that is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: 2^-24 for float32, 2^-8 for bfloat16."""
    return float(torch.finfo(dtype).eps) / 2


def matmul_excess(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """How far `out` is from `a @ b.T` in float64, as a multiple of what rounding allows; at most 1 when it is right.

    `a` is `[tokens, k]`, `b` is `[n, k]`, `out` is `[tokens, n]`. Each element may be off by twice
    `u(out) · |exact| + k · u(float32) · (|a| @ |b|.T)`: one rounding of the result, and `k` roundings of a sum that is
    kept in float32. Two unit roundoffs in all are allowed where the theory needs one.
    """
    return _excess(out, a, b, 1.0, a.shape[-1] * unit_roundoff(torch.float32))


def fp8_excess(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    """As `matmul_excess`, for fp8 operands and a product that is scaled by `scale`.

    Hopper's fp8 products are summed with 14 bits, of which 13 are a fraction, 32 elements at a time; the roundings of
    those `k / 32` steps differ in sign, so that their root is allowed in place of their number.
    """
    return _excess(out, a, b, scale, (a.shape[-1] / 32) ** 0.5 * 2.0**-13)


def _excess(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, summing: float) -> float:
    """The largest error over twice what is allowed: a rounding of the result, and `summing` of `|a| @ |b|.T`."""
    if a.shape[0] > rows_compared():
        chosen = spread(a.shape[0], a.device)
        out, a = (
            out[chosen],
            a[chosen.to(a.device)] if a.element_size() > 1 else a.view(torch.uint8)[chosen].view(a.dtype),
        )
    wide_a, wide_b = (t.float().double() if t.element_size() == 1 else t.double() for t in (a, b))
    exact = wide_a @ wide_b.T * scale
    size = (a.float().abs() @ b.float().abs().T).double() * scale  # a bound may be rounded, what it bounds may not
    allowed = unit_roundoff(out.dtype) * exact.abs() + summing * size
    wide = out.double()
    excess = torch.where(torch.isfinite(wide), (wide - exact).abs() / (2 * allowed + 1e-300), torch.inf)
    return float(excess.max())
