"""How many calls one sample of a GPU holds. Standard library only."""

from __future__ import annotations

import math

CALLS = 128  # of one sample at most
_MS = 0.5  # a sample lasts about this long at least, so that launching it is a small part
_MS_OF_MANY = 0.25  # where several token counts are timed, whose mean decides
_PLACES = 2  # calls at least where there are copies: the time of some kernels depends on where their weights lie


def calls(ms: float, copies: int, points: int = 1) -> int:
    """The calls of `ms` milliseconds each that one sample holds, where the weights lie there in `copies` places.

    Whole turns around the copies, each of which finds the weights out of the cache; fewer than one turn where that
    already lasts long enough. The cache has to be emptied before such a sample: the sample before used the same copies.
    """
    wanted = math.ceil((_MS if points == 1 else _MS_OF_MANY) / ms)
    if max(_PLACES, wanted) < copies:
        return max(_PLACES, wanted)
    return max(1, min(math.ceil(wanted / copies), CALLS // copies)) * copies
