"""Four-bit values by their bits, without a quantizer: two to a byte, the first in the low half.

Tests of a product need no quantized model. Values are drawn as bits, and every block scale is one: then neither the
scales' interleaved layout nor a shuffle of rows that carries the scales along can matter.
"""

from __future__ import annotations

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 by its three low bits; the fourth is the sign
E4M3_ONE, E8M0_ONE = 0x38, 127


def bits(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Random bytes of two values each; `shape` counts bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)


def values(packed: torch.Tensor) -> torch.Tensor:
    """The float32 values of packed bytes, twice as many along the last dimension."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1)
    return table[halves.long()].flatten(-2)


def up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
