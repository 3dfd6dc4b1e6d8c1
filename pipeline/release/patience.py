"""How often and how long a registry is asked before we give up: every retry of this package is made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pipeline.contract.errors import PublishError

from .errors import TooManyRequests

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

_Result = TypeVar("_Result")


class Passing(Exception):
    """A failure that may pass: `cause` is what to raise when it does not, `response` may hold a Retry-After."""

    def __init__(self, cause: PublishError, response: BaseHTTPResponse | None = None) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.response = response


@dataclass(frozen=True)
class Patience:
    """`tries` of each operation in all; waits between them grow from `pause` seconds, twice as long each time, up to
    `longest`, which is also the longest Retry-After that is honoured. `connect` and `silence` are the seconds to wait
    for a connection and for the next bytes; `whole` bounds what is read of one blob in seconds.
    """

    tries: int = 5
    pause: float = 0.5
    longest: float = 60.0
    connect: float = 10.0
    silence: float = 60.0
    whole: float = 900.0

    def insist(self, operation: Callable[[], _Result]) -> _Result:
        """Run an operation until it does not raise `Passing`; the last one's cause is raised when tries are used up."""
        from urllib3.exceptions import InvalidHeader, MaxRetryError
        from urllib3.util import Retry

        left = Retry(
            total=self.tries - 1,
            allowed_methods=None,  # each operation is made so that it can be begun again
            backoff_factor=self.pause,
            backoff_max=self.longest,
            backoff_jitter=self.pause / 2,  # so that the cells of a matrix do not all come back at once
        )
        while True:
            try:
                return operation()
            except Passing as passing:
                asked, response = None, passing.response
                try:
                    asked = left.get_retry_after(response) if response is not None else None
                except InvalidHeader:  # then our own pause serves
                    response = None
                if asked is not None and asked > self.longest:
                    raise TooManyRequests(
                        f"{passing.cause.message}; it asks to come back in {asked:.0f} s",
                        hint=f"run it again then: we wait {self.longest:.0f} s at most",
                    ) from passing
                try:
                    left = left.increment("GET", "", response=response)
                except MaxRetryError:
                    raise passing.cause from passing
                left.sleep(response)
