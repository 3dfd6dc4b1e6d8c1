"""What the instructions of a Dockerfile run, stage by stage: variables put in, directories and checkouts followed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Container, Iterator, Mapping
from itertools import accumulate
from typing import Protocol, TypeVar

from .dockerfile import Arg, Dockerfile, Instruction
from .gitrefs import Shell
from .shelltext import joined, quiet
from .variables import assigned, environment, substituted

_SHELL = frozenset({"RUN", "CMD", "ENTRYPOINT", "HEALTHCHECK"})


class Placed(Protocol):
    """Something found at an offset of a text."""

    @property
    def at(self) -> int:
        """The offset."""


F = TypeVar("F", bound=Placed)
F_co = TypeVar("F_co", bound=Placed, covariant=True)


class Looker(Protocol[F_co]):
    """Whoever finds something in a text; names in `versions` are not put in, they are looked at where they stand."""

    @property
    def versions(self) -> Container[str]:
        """The managed names."""

    def look(self, text: str, shell: Shell | None = None) -> Iterator[F_co]:
        """What is found in one text."""


def commands(reading: Dockerfile, looker: Looker[F]) -> Iterator[tuple[int, F]]:
    """Line and what was found there, of every instruction but FROM and ARG."""
    shells = [Shell()]
    stages = iter(reading.stages)
    declared = _declared(reading, looker.versions)
    coming: deque[Arg] = deque()  # ARGs of the stage that stand further down
    values: dict[str, str] = {}
    ends: list[dict[str, str]] = []  # what each stage's shells know at its end so far
    for instruction in reading.instructions:
        while coming and coming[0].line <= instruction.first:
            arg = coming.popleft()
            values[arg.name] = arg.value or ""
        if instruction.name == "FROM":
            stage = next(stages)
            coming, values = declared[stage.label], dict(ends[stage.parent]) if stage.parent is not None else {}
            ends.append(values)
            shells.append(Shell() if stage.parent is None else shells[stage.parent + 1].copy())
        elif instruction.name == "WORKDIR":
            shells[-1].enter(substituted(instruction.rest.strip().strip("\"'"), values)[0])
        elif instruction.name != "ARG" and not _is_onbuild_arg(instruction):
            yield from _instruction(looker, instruction, values, shells[-1])
            if instruction.name == "ENV":
                known = environment(instruction.rest, values, looker.versions)
                values.clear()
                values.update(known)


def _declared(reading: Dockerfile, managed: Container[str]) -> dict[str | int | None, deque[Arg]]:
    """What shells of each stage see, without the managed names, whose ARGs are checked where they stand."""
    found: dict[str | int | None, deque[Arg]] = defaultdict(deque)
    for arg in reading.args:
        if arg.value and arg.name not in managed:
            found[arg.stage].append(arg)
    return found


def _instruction(
    looker: Looker[F], instruction: Instruction, values: Mapping[str, str], shell: Shell
) -> Iterator[tuple[int, F]]:
    rest = quiet(instruction.rest) if instruction.name in _SHELL else instruction.rest
    if instruction.name == "ENV" and "=" not in rest.partition(" ")[0]:
        rest = rest.replace(" ", "=", 1)
    elif instruction.name == "RUN":
        values = assigned(rest, values, looker.versions)
    text, offsets = substituted(" ".join([*instruction.flags, rest]), values)
    before = sum(len(flag) + 1 for flag in instruction.flags)
    for found in looker.look(text, shell):
        yield instruction.line_at(max(offsets[found.at] - before, 0)), found
    for heredoc in instruction.heredocs:
        bare = quiet("\n".join(heredoc.lines)).split("\n")
        known = assigned("\n".join(bare), values, looker.versions)
        lines = [substituted(line, known)[0] for line in bare]
        starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
        for found in looker.look(joined("\n".join(lines)), shell):
            yield heredoc.first + bisect_right(starts, found.at) - 1, found


def _is_onbuild_arg(instruction: Instruction) -> bool:
    """Whether it holds an ARG ready, which is looked at among the ARGs."""
    return instruction.name == "ONBUILD" and instruction.rest[:4].strip().upper() == "ARG"
