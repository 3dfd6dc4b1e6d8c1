"""The places of one Dockerfile at which versions stand: its ARGs, its base images, and the text of its instructions."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import accumulate

from .dockerfile import (
    ENGINE,
    NEWEST,
    Arg,
    Dockerfile,
    Instruction,
    Problem,
    named_by,
    read,
)
from .gitrefs import Shell
from .shelltext import quiet
from .texts import Found, Texts, joined
from .variables import NAME, assigned, environment, substituted

_SHELL = frozenset({"RUN", "CMD", "ENTRYPOINT", "HEALTHCHECK"})


class Dockerplaces:
    """A Dockerfile under every frontend that may read it: a value that depends on which one is looked at twice."""

    def __init__(self, texts: Texts, text: str) -> None:
        self.texts = texts
        first = read(text, frontend=ENGINE)
        asked = named_by(first.syntax)
        self.readings = [read(text, frontend=asked)] if first.syntax else [first, read(text, frontend=NEWEST)]

    @property
    def problems(self) -> list[Problem]:
        """What BuildKit refuses."""
        return sorted({problem for reading in self.readings for problem in reading.problems})

    def args(self) -> Iterator[tuple[int, str, str | None, bool]]:
        """Line, name and value of each ARG, and whether it is made of others; None where no default is written."""
        seen: set[tuple[int, str, str | None, bool]] = set()
        for reading in self.readings:
            for arg in (*reading.args, *reading.held):
                value = arg.value if arg.raw is not None else None
                seen.add((arg.line, arg.name, value, NAME.search(arg.raw or "") is not None))
        return iter(sorted(seen, key=lambda row: (row[0], row[1], row[2] or "")))

    def inside(self) -> Iterator[tuple[int, Found]]:
        """Line and what was found there, of everything but the ARGs."""
        reading = self.readings[0]
        wrong = self._wrong_args(reading)
        for stage in reading.stages:
            if stage.parent is None and not wrong & _names(stage.raw_base):
                yield from ((stage.line, found) for found in self.texts.look(stage.base))
        shells = [Shell()]
        stages = iter(reading.stages)
        declared = self._declared(reading)
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
                yield from self._instruction(instruction, values, shells[-1])
                if instruction.name == "ENV":
                    known = environment(instruction.rest, values, self.texts.versions)
                    values.clear()
                    values.update(known)

    def _wrong_args(self, reading: Dockerfile) -> set[str]:
        """ARGs that are findings themselves, so that what is built from them need not be one again."""
        managed = self.texts.versions
        found = {arg.name for arg in reading.args if arg.name in managed and arg.value not in (None, managed[arg.name])}
        return found | {arg.name for arg in reading.args if any(one.wrong for one in self.texts.look(arg.value or ""))}

    def _declared(self, reading: Dockerfile) -> dict[str | int | None, deque[Arg]]:
        """What shells of each stage see, without the managed names, whose ARGs are checked where they stand."""
        found: dict[str | int | None, deque[Arg]] = defaultdict(deque)
        for arg in reading.args:
            if arg.value and arg.name not in self.texts.versions:
                found[arg.stage].append(arg)
        return found

    def _instruction(
        self, instruction: Instruction, values: Mapping[str, str], shell: Shell
    ) -> Iterator[tuple[int, Found]]:
        rest = quiet(instruction.rest) if instruction.name in _SHELL else instruction.rest
        if instruction.name == "ENV" and "=" not in rest.partition(" ")[0]:
            rest = rest.replace(" ", "=", 1)
        elif instruction.name == "RUN":
            values = assigned(rest, values, self.texts.versions)
        text, offsets = substituted(" ".join([*instruction.flags, rest]), values)
        before = sum(len(flag) + 1 for flag in instruction.flags)
        for found in self.texts.look(text, shell):
            yield instruction.line_at(max(offsets[found.at] - before, 0)), found
        for heredoc in instruction.heredocs:
            bare = quiet("\n".join("" if line.lstrip().startswith("#") else line for line in heredoc.lines)).split("\n")
            known = assigned("\n".join(bare), values, self.texts.versions)
            lines = [substituted(line, known)[0] for line in bare]
            starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
            for found in self.texts.look(joined("\n".join(lines)), shell):
                yield heredoc.first + bisect_right(starts, found.at) - 1, found


def _names(text: str) -> set[str]:
    return {first or second for first, second in NAME.findall(text)}


def _is_onbuild_arg(instruction: Instruction) -> bool:
    """Whether it holds an ARG ready, which is looked at among the ARGs."""
    return instruction.name == "ONBUILD" and instruction.rest[:4].strip().upper() == "ARG"
