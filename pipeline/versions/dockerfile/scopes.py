"""ARGs of a Dockerfile with their values: the global scope, each stage, and what a stage inherits from another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .layers import Known, Layers, Scope
from .lines import NAMES, Instruction, Lines, Problem, read_lines, split_instruction
from .rules import NEWEST, BadWord, Frontend, named_by
from .splitting import split
from .words import LARGEST, Style, expand

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STAGE_NAME = re.compile(r"[a-z][a-z0-9-_.]*")
_BLANKS = re.compile(r"[\t\v\f\r ]+")
_SHOWN = 300  # characters of a word in a message
_NOT_ENVIRONMENT = ("BUILDKIT_SBOM_SCAN_CONTEXT", "BUILDKIT_SBOM_SCAN_STAGE")


class Arg(NamedTuple):
    """One ARG: the line of its name, its scope, its text, and its value after expansion.

    `stage` is the stage's name, its index where it has none, None in the global scope. `raw` is None where no
    default is written; `value` is None where the file gives the ARG no value, or where BuildKit refuses it.
    `first` and `last` are the lines of the whole instruction.
    """

    line: int
    stage: str | int | None
    name: str
    raw: str | None
    value: str | None
    first: int
    last: int


@dataclass(frozen=True)
class Stage:
    """One FROM: its line, index, name (None: it has none), base as written and after expansion."""

    line: int
    index: int
    name: str | None
    raw_base: str
    base: str
    parent: int | None  # the index of the stage that it is built from

    @property
    def label(self) -> str | int:
        """Its name, or its index where it has none."""
        return self.index if self.name is None else self.name


class Dockerfile(NamedTuple):
    """What BuildKit would read."""

    args: tuple[Arg, ...]
    stages: tuple[Stage, ...]
    instructions: tuple[Instruction, ...]
    problems: tuple[Problem, ...]
    syntax: str
    held: tuple[Arg, ...]  # ARGs that an ONBUILD holds ready, as an image built on that stage would see them


@dataclass
class _Scope:
    """A stage while it is read."""

    stage: Stage
    values: Scope
    onbuild: list[tuple[int, str]] = field(default_factory=list)  # line, instruction


def read(text: str, *, frontend: Frontend | None = None, platform: str = "linux/amd64") -> Dockerfile:
    """Read a Dockerfile as a version of BuildKit's frontend does (by default the one that the file's `# syntax=`
    line asks for, else the engine's own), without build arguments.

    `platform` gives TARGETPLATFORM and its kin. The environment of a base image is not known here: of it only
    the PATH that every image has. Never raises for bad input; `problems` lists what BuildKit refuses.
    """
    frontend = frontend or named_by(read_lines(text, NEWEST).syntax)
    lines = read_lines(text, frontend)
    reader = _Reader(lines, frontend, platform)
    for instruction in lines.instructions:
        reader.read(instruction)
    if not reader.scopes and not lines.problems and not reader.problems:
        reader.problems.append(Problem(lines.instructions[-1].first, "there is no FROM in this file"))
    problems = sorted(set(lines.problems) | set(reader.problems))
    stages = tuple(scope.stage for scope in reader.scopes)
    args, held = tuple(reader.args), reader.held()
    return Dockerfile(args, stages, tuple(lines.instructions), tuple(problems), lines.syntax, held)


def _platform(platform: str, frontend: Frontend) -> dict[str, str]:
    system, _, rest = platform.partition("/")
    machine, _, variant = rest.partition("/")
    parts = {"PLATFORM": platform, "OS": system, "ARCH": machine, "VARIANT": variant}
    if frontend >= (1, 12):
        parts["OSVERSION"] = ""
    return {f"{side}{name}": value for side in ("BUILD", "TARGET") for name, value in parts.items()}


class _Reader:
    def __init__(self, lines: Lines, frontend: Frontend, platform: str) -> None:
        self.frontend = frontend
        self.escape = lines.escape
        self.style = Style(lines.escape, frontend)
        self.room = 16 * LARGEST  # characters of all values together
        self.args: list[Arg] = []
        self.scopes: list[_Scope] = []
        self.problems: list[Problem] = []
        self.known = _platform(platform, frontend)  # what global words may name
        self.globals: dict[str, str | None] = dict(self.known)  # what an ARG without default takes in a stage
        self.by_name: dict[str, _Scope] = {}
        self.given: set[str] = set()  # global ARGs of the file itself
        self.to_be_given: set[str] = set()  # those of them without default

    def wrong(self, line: int, message: str) -> None:
        self.problems.append(Problem(line, message))

    def read(self, instruction: Instruction) -> None:
        if instruction.name == "FROM":
            self._from(instruction)
        elif instruction.name == "ARG" and not self.scopes:
            self._global_args(instruction)
        elif not self.scopes and instruction.name in NAMES:  # another is wrong anyway
            self.wrong(instruction.first, f"{instruction.name} stands before the first FROM")
        elif not self.scopes:
            return
        elif instruction.name == "ARG":
            self._stage_args(self.scopes[-1], instruction)
        elif instruction.name == "ENV":
            self._env(self.scopes[-1], instruction)
        elif instruction.name == "ONBUILD":
            self._onbuild(self.scopes[-1], instruction)

    def _words(self, instruction: Instruction) -> Iterator[tuple[int, str, str | None]]:
        """Line, name and default of each ARG of an instruction."""
        words = split(instruction.rest, self.escape)
        if not words:
            self.wrong(instruction.first, "ARG without a name")
        for word in words:
            name, equals, default = word.text.partition("=")
            line = instruction.line_at(word.offset)
            if not name:
                self.wrong(line, f"ARG without a name before {word.text!r}")
                continue
            yield line, name, default if equals else None

    def _expand(self, text: str, values: Known, line: int) -> str | None:
        try:
            value = expand(text, values, self.style)
            self.room -= len(value)
            if self.room < 0:
                raise BadWord("what all words expand to is too large")
        except BadWord as error:
            self.wrong(line, f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}: {error}")
            return None
        return value

    def _global_args(self, instruction: Instruction) -> None:
        for line, name, raw in self._words(instruction):
            value = None if raw is None else self._expand(raw, self.known, line)
            if raw is not None and value is None and self.frontend < (1, 8):
                value = ""  # these frontends swallow the error
            if value is not None:
                self.known[name] = value
                self.globals[name] = value
            elif self.frontend < (1, 11):
                self.known[name] = ""  # set, but to nothing
                self.globals[name] = None
            self.args.append(Arg(line, None, name, raw, value, instruction.first, instruction.last))
            self.given.add(name)
            if raw is None:
                self.to_be_given.add(name)

    def _stage_args(self, scope: _Scope, instruction: Instruction, *, at: int = 0) -> None:
        """ARGs of a stage; `at` is the line to report instead, for those that an ONBUILD brought."""
        together = self.frontend < (1, 8)  # then no ARG sees another of the same instruction
        after: list[tuple[str, str]] = []
        for line, written, raw in self._words(instruction):
            name = (self._expand(written, scope.values, line) or written) if together else written
            value = self.globals.get(name) if raw is None else self._expand(raw, scope.values, line)
            if value is not None and name not in _NOT_ENVIRONMENT:
                if together:
                    after.append((name, value))
                else:
                    scope.values.arg(name, value)
            if raw is None and name in self.globals and not self._is_given(name):
                value = None  # the builder gives it a value, the file does not
            first, last = (at, at) if at else (instruction.first, instruction.last)
            self.args.append(Arg(at or line, scope.stage.label, name, raw, value, first, last))
        for name, value in after:
            scope.values.arg(name, value)

    def _is_given(self, name: str) -> bool:
        """Whether the file itself declares a global ARG of that name."""
        return name in self.given

    def _is_to_be_given(self, text: str) -> bool:
        """Whether a word names a global ARG without default: a build argument will say what it is."""
        return not self.to_be_given.isdisjoint(re.findall(r"\w+", text))

    def _env(self, scope: _Scope, instruction: Instruction) -> None:
        words = split(instruction.rest, self.escape)
        if not words:
            return self.wrong(instruction.first, "ENV without a name")
        if "=" in words[0].text:
            pairs = [word.text.partition("=") for word in words]
        else:
            name, *rest = _BLANKS.split(instruction.rest, maxsplit=1)
            pairs = [(name, "=", rest[0])] if rest else [(name, "", "")]
        after: list[tuple[str, str]] = []
        for name, equals, value in pairs:
            if not equals or not name:
                self.wrong(instruction.first, f"ENV {name}: a name and a value are needed")
                continue
            key = self._expand(name, scope.values, instruction.first)
            text = self._expand(value, scope.values, instruction.first)
            if key is not None and text is not None:
                after.append((key, text))
        for key, text in after:
            scope.values.environment(key, text)
        return None

    def _onbuild(self, scope: _Scope, instruction: Instruction) -> None:
        name = split_instruction(instruction.rest, self.escape, self.frontend)[0]
        if not name:
            self.wrong(instruction.first, "ONBUILD without an instruction")
        elif name in ("ONBUILD", "FROM", "MAINTAINER"):
            self.wrong(instruction.first, f"ONBUILD {name} is not allowed")
        else:
            scope.onbuild.append((instruction.first, instruction.rest))

    def _from(self, instruction: Instruction) -> None:
        parts = _BLANKS.split(instruction.rest) if instruction.rest else []
        name: str | None = None
        if len(parts) == 3 and parts[1].lower() == "as":
            name = parts[2].lower()
            if not _STAGE_NAME.fullmatch(name):
                self.wrong(instruction.first, f"{parts[2]!r} cannot name a stage")
        elif len(parts) != 1:
            self.wrong(instruction.first, "FROM needs an image, or an image, AS and a name")
        raw_base = parts[0] if parts else ""
        base = self._expand(raw_base, self.known, instruction.first)
        if base == "" and parts and not self._is_to_be_given(raw_base):
            self.wrong(instruction.first, f"FROM {raw_base} names nothing")
        for flag in instruction.flags:
            if flag.startswith("--platform="):
                self._expand(flag.removeprefix("--platform="), self.known, instruction.first)
        parent = self.by_name.get(base or "")
        index = len(self.scopes)
        stage = Stage(instruction.first, index, name, raw_base, base or "", parent.stage.index if parent else None)
        scope = _Scope(stage, Scope(Layers(), Layers()) if parent is None else parent.values.child())
        if parent is None:
            scope.values.env.own["PATH"] = _PATH
        self.scopes.append(scope)
        if name is not None:
            self.by_name[name] = scope
        if parent is not None and self.frontend != (1, 11):  # which forgot them
            for line, trigger in parent.onbuild:
                self._trigger(scope, trigger, line)

    def held(self) -> tuple[Arg, ...]:
        """What the ONBUILDs of each stage would declare in an image built on it; what they would refuse is no matter
        here. The last thing that a reader does: it forgets what it read.
        """
        self.args, self.problems = [], []
        for scope in self.scopes:
            if scope.onbuild:
                child = _Scope(scope.stage, scope.values.image())
                for line, trigger in scope.onbuild:
                    self._trigger(child, trigger, line)
        return tuple(self.args)

    def _trigger(self, scope: _Scope, trigger: str, line: int) -> None:
        """What an ONBUILD of the base stage does here; it is parsed anew, with the default escape character."""
        for instruction in read_lines(trigger, self.frontend).instructions:
            if instruction.name == "ARG":
                self._stage_args(scope, instruction, at=line)
            elif instruction.name == "ENV":
                self._env(scope, instruction)
