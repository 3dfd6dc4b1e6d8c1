"""Weights that each call finds out of the cache, as a layer of a model does.

Either the calls of a sample go round copies of the weights that together exceed the L2 cache, or, where fewer calls
than copies last long enough, the cache is emptied before the sample and each of its calls has a copy of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.tune.tuner import Question

_L2_TIMES = 3  # the copies of the weights exceed the L2 cache this many times
_EVICT_TIMES = 2  # and so many times its size is read to empty it
_SETS, _SHARE = 2, 16  # graphs of each candidate; one if the copies took more than this part of the device's memory
_SMALL, _PLACES = 4 << 20, 4  # bytes of an activation that is moved about, and to how many places


def evict(device: torch.device) -> None:
    """Let the device read so much that nothing older is left in its L2 cache, without waiting; nothing is written.

    On an H200 that is 120 MB.
    """
    much, result = _much(device)
    torch.amax(much, dim=0, out=result)


@functools.cache
def _much(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read, and a place for the result; once for a process."""
    size = _EVICT_TIMES * int(torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.zeros(size // 4, dtype=torch.float32, device=device), torch.zeros((), device=device)


class Copies:
    """Copies of weights in other memory; points that share a weight share its copies."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._cache, self._memory = int(properties.L2_cache_size), int(properties.total_memory)
        self._clones: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}

    def sets(self, points: Sequence[Question]) -> list[list[list[list[Any]]]]:
        """For each set and point the inputs, over and over with the weights in other memory.

        What the tuning config makes dynamic follows the token count: activations and outputs. Small ones get a few
        copies that all fit into the cache, since the time of some kernels depends on where they lie. A flat tensor of
        bytes is a workspace and is not copied.
        """
        sizes = [sum(point.inputs[i].nbytes for i in _still(point)) for point in points]
        counts = [self._count(size) for size in sizes]
        fits = all(_SETS * n * size <= self._memory // _SHARE for n, size in zip(counts, sizes, strict=True))
        number = _SETS if fits else 1
        return [[self._turned(point, n, one) for point, n in zip(points, counts, strict=True)] for one in range(number)]

    def _count(self, size: int) -> int:
        return max(2, min(16, math.ceil(_L2_TIMES * self._cache / size))) if 1 << 20 < size < 1 << 30 else 1

    def _turned(self, point: Question, count: int, one: int) -> list[list[Any]]:
        still, small = _still(point), _small(point)
        turned: list[list[Any]] = []
        for copy in range(count):
            again = list(point.inputs)
            for index in still:
                again[index] = self._clone(point.inputs[index], one * count + copy)
            for index in small if copy or one else ():
                again[index] = turned[copy % _PLACES][index] if copy >= _PLACES else point.inputs[index].clone()
            turned.append(again)
        return turned

    def _clone(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The tensor itself as number 0, else a copy of it."""
        clones = self._clones.setdefault((tensor.data_ptr(), tuple(tensor.shape)), [tensor])
        while len(clones) <= number:
            clones.append(tensor.clone())
        return clones[number]


def _moving(point: Question) -> set[int]:
    """The inputs that follow the token count."""
    moving = {index for spec in point.config.dynamic_tensor_specs for index in spec.input_idx}
    return moving | {spec.input_idx for spec in point.config.constraint_specs}


def _still(point: Question) -> list[int]:
    """The inputs that do not, on the device, workspaces aside."""
    moving = _moving(point)
    return [
        index
        for index, tensor in enumerate(point.inputs)
        if isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cuda"
        and index not in moving
        and not (tensor.dim() == 1 and tensor.dtype in (torch.uint8, torch.int8))
    ]


def _small(point: Question) -> list[int]:
    return [i for i in _moving(point) if isinstance(point.inputs[i], torch.Tensor) and point.inputs[i].nbytes <= _SMALL]
