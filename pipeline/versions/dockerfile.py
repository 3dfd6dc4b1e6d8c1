"""ARGs of a Dockerfile with their values, as BuildKit's newest frontend reads them.

Instructions, flags, heredocs and words come from e2b-dockerfile-utils, a port of BuildKit's parser and lexer; scopes
and inheritance between stages are here. tests/docker/test_versions_outline.py compares both with BuildKit itself. What
an ONBUILD does to images that are built on this one is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from e2b_dockerfile_utils import DockerfileSyntaxError, ShellLex, parse_dockerfile_ast
from e2b_dockerfile_utils.syntax import DockerfileInstruction

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLATFORM = {"PLATFORM": "linux/amd64", "OS": "linux", "ARCH": "amd64", "VARIANT": "", "OSVERSION": ""}
_MOST = 1 << 22  # characters of all values together; BuildKit itself has no limit but its memory
_LONGEST = 64 * 1024 - 1  # bytes of one line
_STAGE_NAME = re.compile(r"[a-z][a-z0-9-_.]*")
_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::\w[\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*:[0-9a-fA-F]{32,})?"
)
_BARE = {"link", "parents", "keep-git-dir", "unpack"}  # flags that need no value
_FLAGS = {
    "FROM": {"platform"},
    "COPY": {"from", "chown", "chmod", "link", "parents", "exclude"},
    "ADD": {"chown", "chmod", "link", "keep-git-dir", "checksum", "exclude", "unpack"},
    "RUN": {"mount", "network", "security", "device"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}


class Problem(NamedTuple):
    """Something that BuildKit refuses, and its line."""

    line: int
    message: str


class Arg(NamedTuple):
    """One ARG: the line of its name, its scope, its text, and its value after expansion.

    `stage` is the stage's name, its index where it has none, None in the global scope. `raw` is None where no default
    is written; `value` is None where the file gives the ARG no value, or where BuildKit refuses it.
    """

    line: int
    stage: str | int | None
    name: str
    raw: str | None
    value: str | None


@dataclass(frozen=True)
class Stage:
    """One FROM: its line, index, name (None: it has none), and base after expansion; `parent` is a stage's index."""

    line: int
    index: int
    name: str | None
    base: str
    parent: int | None


@dataclass
class Dockerfile:
    """What BuildKit would read."""

    args: list[Arg] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    instructions: list[DockerfileInstruction] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    known: list[Mapping[str, str]] = field(default_factory=list)  # for each instruction: what names mean there


@dataclass
class _Scope:
    """A stage while it is read: an ENV of a base wins over an ARG of the same name there."""

    label: str | int
    env: dict[str, str]
    args: dict[str, str]  # of the bases
    here: dict[str, str] = field(default_factory=dict)

    def known(self) -> dict[str, str]:
        """What names mean here."""
        return {**self.args, **self.env, **self.here}


def read(text: str) -> Dockerfile:
    """Read a Dockerfile without build arguments; never raises, `problems` lists what BuildKit refuses.

    TARGETPLATFORM and its kin are those of linux/amd64. Of a base image's environment only the PATH is known here.
    """
    reader = _Reader(text.removeprefix("\ufeff"))
    reader.run()
    reader.result.problems.sort()
    return reader.result


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.result = Dockerfile()
        self.escape = "\\"
        self.room = _MOST
        self.scopes: list[_Scope] = []
        self.by_name: dict[str, int] = {}
        self.known = {f"{side}{name}": value for side in ("BUILD", "TARGET") for name, value in _PLATFORM.items()}
        self.given: set[str] = set()  # global ARGs of the file itself
        self.open: set[str] = set()  # those of them without a default

    def wrong(self, line: int, message: str) -> None:
        self.result.problems.append(Problem(line, message))

    def run(self) -> None:
        long = [number for number, line in enumerate(self.lines, 1) if len(line.encode("utf-8", "replace")) > _LONGEST]
        if long:
            return self.wrong(long[0], f"the line is longer than {_LONGEST} bytes")
        ast, text = None, self.text
        while ast is None:
            try:
                ast = parse_dockerfile_ast(text)
            except DockerfileSyntaxError as error:
                line = error.line or 1
                self.wrong(line, re.sub(r"^Dockerfile parse error( on line \d+)?: ", "", str(error)))
                text = "\n".join(self.lines[: line - 1])  # what stands before it is still read
            except RecursionError:
                return self.wrong(1, "nested too deeply")
        self.escape = ast.escape_token
        self.result.instructions = ast.instructions
        if not ast.instructions and not self.result.problems:
            self.wrong(1, "there is no instruction in this file")
        for instruction in ast.instructions:
            self.result.known.append(self.scopes[-1].known() if self.scopes else dict(self.known))
            self._flags(instruction)
            self._instruction(instruction)
        if not self.scopes and ast.instructions and not self.result.problems:
            self.wrong(ast.instructions[-1].start_line, "there is no FROM in this file")
        return None

    def _instruction(self, instruction: DockerfileInstruction) -> None:
        name, line = instruction.name, instruction.start_line
        if name == "FROM":
            self._from(instruction)
        elif name == "ARG":
            self._arg(instruction)
        elif not self.scopes:
            self.wrong(line, f"{name} stands before the first FROM")
        elif name == "ENV":
            self._env(self.scopes[-1], instruction.args, line)

    def _line_of(self, instruction: DockerfileInstruction) -> Mapping[str, int]:
        """The line on which each word of an instruction begins."""
        found, number = {}, instruction.start_line
        whole = "\n".join(self.lines[number - 1 : instruction.end_line])
        for word in instruction.args:
            start = word.partition("=")[0]
            for line in range(number, instruction.end_line + 1) if start and start in whole else ():
                text = self.lines[line - 1]
                if not text.lstrip().startswith("#") and re.search(rf"(?<!\w){re.escape(start)}(?!\w)", text):
                    number = line
                    break
            found[word] = number
        return found

    def _expand(self, text: str, known: Mapping[str, str], line: int) -> str | None:
        try:
            value = ShellLex(self.escape, env=known, skip_unset_env=False).process_word(text)
        except ValueError as error:
            shown = str(error).removeprefix(f"failed to process {text!r}: ")
            self.wrong(line, f"{text if len(text) < 300 else text[:300] + '…'}: {shown}")
            return None
        self.room -= len(value)
        if self.room < 0:
            self.wrong(line, f"{text[:80]}: what it expands to is too large")
            return None
        return value

    def _arg(self, instruction: DockerfileInstruction) -> None:
        scope = self.scopes[-1] if self.scopes else None
        if not instruction.args:
            self.wrong(instruction.start_line, "ARG without a name")
        lines = self._line_of(instruction)
        for word in instruction.args:
            name, equals, default = word.partition("=")
            line = lines[word]
            if not name:
                self.wrong(line, f"ARG without a name before {word!r}")
                continue
            raw = default if equals else None
            if scope is None:
                value = None if raw is None else self._expand(raw, self.known, line)
                self.given.add(name)
                if raw is None:
                    self.open.add(name)
                if value is not None:
                    self.known[name] = value
                self.result.args.append(Arg(line, None, name, raw, value))
                continue
            value = self.known.get(name) if raw is None else self._expand(raw, scope.known(), line)
            if value is not None:
                scope.here[name] = value
            if raw is None and name not in self.given:
                value = None  # the builder gives it a value, the file does not
            self.result.args.append(Arg(line, scope.label, name, raw, value))

    def _env(self, scope: _Scope, triples: list[str], line: int) -> None:
        if not triples:
            self.wrong(line, "ENV without a name")
        known = scope.known()
        for name, value in zip(triples[::3], triples[1::3], strict=True):
            key, text = self._expand(name, known, line), self._expand(value, known, line)
            if not name:
                self.wrong(line, "ENV without a name")
            elif key is not None and text is not None:
                scope.env[key] = scope.here[key] = text

    def _from(self, instruction: DockerfileInstruction) -> None:
        parts, line = instruction.args, instruction.start_line
        name: str | None = None
        if len(parts) == 3 and parts[1].lower() == "as":
            name = parts[2].lower()
            if not _STAGE_NAME.fullmatch(name):
                self.wrong(line, f"{parts[2]!r} cannot name a stage")
        elif len(parts) != 1:
            self.wrong(line, "FROM needs an image, or an image, AS and a name")
        raw = parts[0] if parts else ""
        base = self._expand(raw, self.known, line) or ""
        later = not self.open.isdisjoint(re.findall(r"\w+", raw))  # a build argument will say what it is
        if parts and not later and (base or "$" in raw):
            if not base:
                self.wrong(line, f"FROM {raw} names nothing")
            elif base not in self.by_name and not _REFERENCE.fullmatch(base):
                self.wrong(line, f"{base} is no reference of an image")
        parent = self.by_name.get(base)
        index = len(self.scopes)
        self.result.stages.append(Stage(line, index, name, base, parent))
        label = index if name is None else name
        if parent is None:
            scope = _Scope(label, {"PATH": _PATH}, {})
        else:
            below = self.scopes[parent]
            scope = _Scope(label, dict(below.env), {**below.args, **below.here})
        self.scopes.append(scope)
        if name is not None:
            self.by_name[name] = index

    def _flags(self, instruction: DockerfileInstruction) -> None:
        """Flags that BuildKit refuses: unknown, without a value, or a variable where none is expanded."""
        line, allowed = instruction.start_line, _FLAGS.get(instruction.name, set())
        for flag in instruction.flags:
            name, equals, value = flag.removeprefix("--").partition("=")
            if name not in allowed:
                self.wrong(line, f"{instruction.name}: unknown flag --{name}")
            elif not equals and name not in _BARE:
                self.wrong(line, f"{instruction.name} --{name}: flag without a value")
            elif name == "from" and "$" in value:
                self.wrong(line, f"{instruction.name} --from={value}: a variable is not expanded in --from")
            elif name == "mount":
                for part in value.split(","):
                    if part.startswith("from=") and "$" in part:
                        self.wrong(
                            line, f"RUN --mount={value}: a variable is not expanded in {part.partition('=')[0]}="
                        )
