"""What was found about one image: an answer for each thing that must prove it, and whether that is all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.contract.errors import CacheRefused, PublishError
from pipeline.registry.errors import InvalidResponse, NotFound

State = Literal["ok", "missing", "wrong", "unchecked"]


class EvidenceIncomplete(PublishError):
    """Something that must prove the image is missing, wrong or could not be checked; the details name each."""


@dataclass(frozen=True)
class Answer:
    """One thing that was looked for: its name, how it stands, and one line that says what was found."""

    name: str
    state: State
    what: str

    def __str__(self) -> str:
        return f"{self.state:<9} {self.name}: {self.what}"


@dataclass(frozen=True)
class Evidence:
    """Everything that was found about one image; `digest` is what its name led to."""

    image: str
    digest: str
    answers: tuple[Answer, ...]

    @property
    def complete(self) -> bool:
        """Whether all of it is there and fits."""
        return all(answer.state == "ok" for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """The evidence as JSON values."""
        return {
            "image": self.image,
            "digest": self.digest,
            "result": "pass" if self.complete else "fail",
            "checks": [asdict(answer) for answer in self.answers],
        }

    def demand(self) -> None:
        """Raise `EvidenceIncomplete` unless all of it is there and fits."""
        lacking = [answer for answer in self.answers if answer.state != "ok"]
        if lacking:
            raise EvidenceIncomplete(
                f"{self.image}: {len(lacking)} of {len(self.answers)} checks did not pass: "
                + ", ".join(f"{answer.name} {answer.state}" for answer in lacking),
                hint="the lines above say what of each; a release attaches all of it",
            )


_SHAPE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError)


@contextlib.contextmanager
def foreign(what: str) -> Iterator[None]:
    """Read what anyone who may push may have written: whatever shape it has, raise `InvalidResponse` and no other."""
    try:
        yield
    except _SHAPE as error:
        raise InvalidResponse(f"{what} does not have the expected shape") from error


def told(name: str, find: Callable[[], Answer]) -> Answer:
    """An answer, where what is attached cannot be read or is not what it should be: that is wrong, not a failure."""
    try:
        with foreign("what is attached"):
            return find()
    except (InvalidResponse, NotFound, CacheRefused) as error:
        return Answer(name, "wrong", error.message)
