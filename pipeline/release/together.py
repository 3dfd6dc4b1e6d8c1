"""Asking a registry for several things at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def together(work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int) -> list[_Result]:
    """`work` of every item, in their order; the first error is raised once nothing runs any more.

    An interruption does not wait: what the threads do can be begun again, and may sit out a registry for minutes.
    """
    pool = ThreadPoolExecutor(at_once)
    wait = True
    try:
        return list(pool.map(work, items))
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)
