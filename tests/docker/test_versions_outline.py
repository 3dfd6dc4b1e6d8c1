"""The reader of Dockerfile ARGs against BuildKit's own outline, on whatever engine answers.

The outline omits ARGs that a target does not use, so each file is taken apart: for the global scope one file with a
last stage that declares every global ARG anew, for each stage one that ends with it. Bases that are no stage of the
file become `scratch`, so that no registry is asked.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from pipeline.daemon import Engine
from pipeline.daemon.buildx import CALL, environment, parse_version
from pipeline.run import clean_environment
from pipeline.versions.dockerfile import ENGINE, Arg, Dockerfile, Frontend, read, words

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases" / "dockerfile_args"
RENDERED = sorted(
    p for p in (ROOT / "docker").iterdir() if "dockerfile" in p.name.lower() and p.suffix != ".dockerignore"
)

pytestmark = pytest.mark.engine

# The frontend that is built into an engine: the release notes of moby name the BuildKit, BuildKit's tags the frontend.
BUILT_IN = {26: ENGINE, 27: Frontend(1, 9), 28: Frontend(1, 19)}


@dataclass(frozen=True)
class Outline:
    """Asks the engine; `frontend` is the one built into it."""

    engine: Engine
    frontend: Frontend
    words: tuple[str, ...]
    env: dict[str, str]

    def __call__(self, text: str, target: str) -> dict[str, tuple[str, int]] | None:
        """Name -> value and line of the ARGs that a target uses; None where BuildKit refuses the file."""
        stages = re.findall(r"(?im)^from\s+\S+\s+as\s+(\S+)", text)
        outside = {name for name in re.findall(r"\bfrom=([a-z][\w.-]*)", text) if name not in stages}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Dockerfile").write_bytes(text.encode())
            contexts = [f"--build-context={name}={folder}" for name in sorted(outside)]
            done = subprocess.run(
                [
                    "docker",
                    "buildx",
                    "build",
                    *self.words,
                    "--output=type=cacheonly",
                    *contexts,
                    "--target",
                    target,
                    folder,
                ],
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        if done.returncode:
            assert "failed to resolve source metadata" not in done.stderr, text
            return None
        return {
            arg["name"]: (arg.get("value", ""), arg["location"]["ranges"][0]["start"]["line"])
            for arg in json.loads(done.stdout).get("args") or []
        }


@pytest.fixture(scope="session")
def outline(engine: Engine) -> Outline:
    env = clean_environment(environment(engine))
    version = parse_version(
        subprocess.run(["docker", "buildx", "version"], env=env, capture_output=True, text=True, check=True).stdout
    )
    assert version is not None
    words = ("--call=outline,format=json",) if version >= CALL else ("--print=outline,format=json",)
    env |= {} if version >= CALL else {"BUILDX_EXPERIMENTAL": "1"}
    major = int(re.match(r"\d+", engine_version(env))[0])  # type: ignore[index]
    assert major in BUILT_IN, f"say in BUILT_IN which frontend engine {major} has"
    return Outline(engine, BUILT_IN[major], words, env)


def engine_version(env: dict[str, str]) -> str:
    done = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def without_registry(text: str, found: Dockerfile) -> str:
    """The file with every base that is no stage of it replaced by scratch, and every stage named; lines stay."""
    lines = text.split("\n")
    for stage in found.stages:
        base = stage.raw_base if stage.parent is not None or stage.base == "scratch" else "scratch"
        instruction = next(one for one in found.instructions if one.name == "FROM" and one.first == stage.line)
        end = "\r" if lines[stage.line - 1].endswith("\r") else ""
        name = stage.name or f"zz-stage-{stage.index}"
        lines[stage.line - 1] = f"FROM {base} AS {name}{end}"
        for number in range(instruction.first, instruction.last):
            lines[number] = end
    return "\n".join(lines)


def parts(text: str, found: Dockerfile, frontend: Frontend) -> Iterator[tuple[str, str, dict[str, Arg]]]:
    """`(file, target, what the outline must show)` for the global scope and for each stage."""
    lines = text.split("\n")
    globally = {arg.name: arg for arg in found.args if arg.stage is None}
    plain = [name for name in globally if name.isidentifier()]
    if plain:
        head = lines[: found.stages[0].line - 1]
        redeclared = "\n".join([*head, "FROM scratch AS zz-globals", "ARG " + " ".join(plain), ""])
        yield redeclared, "zz-globals", {name: globally[name] for name in plain}
    for stage in found.stages:
        end = next((other.line - 1 for other in found.stages if other.index == stage.index + 1), len(lines))
        own: dict[str, Arg] = {}
        for arg in found.args:
            if arg.stage == stage.label and arg.name.isidentifier() and not taken_from_outside(arg, globally, frontend):
                own[arg.name] = arg
        yield "\n".join([*lines[:end], ""]), stage.name or f"zz-stage-{stage.index}", own


def taken_from_outside(arg: Arg, globally: dict[str, Arg], frontend: Frontend) -> bool:
    """An ARG without default takes a global one's value, or the builder's, and is shown there or not at all."""
    from_builder = arg.name.startswith(("TARGET", "BUILD"))
    from_file = arg.name in globally and (frontend < (1, 11) or globally[arg.name].value is not None)
    return arg.raw is None and (from_builder or from_file)


def disagreements(outline: Outline, text: str) -> list[str]:
    found = read(text, frontend=outline.frontend)
    bare = without_registry(text, found)
    wrong: list[str] = []
    for file, target, expected in parts(bare, found, outline.frontend):
        shown = outline(file, target)
        if shown is None:
            if not found.problems:
                wrong.append(f"BuildKit refuses {target}")
            continue
        for name, arg in expected.items():
            if name not in shown:
                wrong.append(f"{target}: {name} is not in the outline")
                continue
            value, line = shown[name]
            if value != (arg.value or ""):
                wrong.append(f"{target}: {name} is {value!r}, we read {arg.value!r}")
            if arg.value is not None and line != arg.first and not from_onbuild(arg, found):
                wrong.append(f"{target}: {name} is on line {line}, we read {arg.first}")
        known = {arg.name for arg in found.args}
        wrong += [f"{target}: {name} is missing here" for name in shown if name not in known and name.isidentifier()]
    return wrong


def from_onbuild(arg: Arg, found: Dockerfile) -> bool:
    return any(one.name == "ONBUILD" and one.first == arg.first for one in found.instructions)


def test_the_engine_is_asked_and_answers(outline: Outline) -> None:
    assert outline("ARG A=1\nFROM scratch AS s\nARG A\nARG B=2\n", "s") == {"A": ("1", 1), "B": ("2", 4)}
    assert outline("FROM scratch AS s\nRUN <<EOF\n", "s") is None


def test_a_disagreement_would_be_seen(outline: Outline) -> None:
    other = Frontend(1, 7) if outline.frontend >= (1, 8) else Frontend(1, 8)
    wrong = Outline(outline.engine, other, outline.words, outline.env)
    assert disagreements(wrong, "FROM scratch AS s\nARG A=1 B=$A\n") != []


@pytest.mark.parametrize("path", sorted(CASES.glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_cases(outline: Outline, path: Path) -> None:
    assert disagreements(outline, path.read_bytes().decode()) == []


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.name)
def test_every_dockerfile_that_we_render(outline: Outline, path: Path) -> None:
    assert disagreements(outline, path.read_bytes().decode()) == []


NAMES = st.sampled_from(["A", "B", "C", "D", "LONG_NAME_1"])
# `${X%}` with nothing behind it ends the process of older frontends, and so the engine: never asked.
VALUES = st.one_of(
    st.sampled_from(["1", "1.2.3", '"2"', "'x y'", "''", '""', "a\"b\"'c'", "\\$A", "a\\ b", "x=y", "é", "'$A'"]),
    st.just('1"."2'),
    st.builds("{}${{{}{}}}".format, st.sampled_from(["", "v", '"'[:0]]), NAMES, st.sampled_from(
        ["", ":-d", ":+p", "-d", "+p", "%.*", "%%.*", "#*.", "##*.", "#1", "/1/2", "//./-", ":-$B", ":-${C}.1", ":-'q'"]
    )),
    st.builds("${}.{}".format, NAMES, st.sampled_from(["1", "x"])),
    st.builds('"{}-${}"'.format, st.sampled_from(["a", "b c"]), NAMES),
)  # fmt: skip
GAPS = st.sampled_from([" ", "  ", "\t", " \\\n", " \\\n# note\n  ", " \\\n\n ", " \\  \n   # x \\\n \t"])
HEREDOCS = st.sampled_from(
    [
        "RUN <<EOF\nARG A=9\nEOF",
        "RUN <<-EOT cat\n\tFROM x\n\tEOT",
        "COPY <<A <<B /x/\nARG B=8\nA\nB",
        'RUN cat 3<<"E F" y\nARG C=7\nE F',
        'RUN echo "<<EOF"',
        'RUN ["a", "<<EOF"]',
        "RUN cat <<<EOF",
        "RUN a\\\n# c <<NO\n b <<EOF\nARG A=9\nEOF",
    ]
)


@st.composite
def arg_lines(draw: Any, free: list[str] | None = None) -> str:
    """An ARG instruction; `free` names are used once each: older engines end themselves on global ARGs in a circle."""
    text = draw(st.sampled_from(["ARG", "arg", "Arg"])) + draw(st.sampled_from([" ", "\t", " \\\n", "\\\n "]))
    count = draw(st.integers(1, 3))
    pieces = []
    for _ in range(count):
        if free is not None and not free:
            break
        name = free.pop() if free is not None else draw(NAMES)
        pieces.append(name if draw(st.integers(0, 4)) == 0 else f"{name}={draw(VALUES)}")
    assume(pieces)
    for number, piece in enumerate(pieces):
        text += (draw(GAPS) if number else "") + piece
    return text + draw(st.sampled_from(["", "", " ", "\t"]))


@st.composite
def dockerfiles(draw: Any) -> str:
    lines = draw(st.lists(st.sampled_from(["# escape=\\", "# note", "#escape = \\"]), max_size=1))
    free = draw(st.permutations(["A", "B", "C", "D", "LONG_NAME_1"]))
    for _ in range(draw(st.integers(0, 3))):
        if free:
            lines.append(draw(arg_lines(free)))
    stages = ["scratch"]
    for number in range(draw(st.integers(1, 3))):
        base = draw(st.sampled_from(stages))
        lines.append(
            f"{draw(st.sampled_from(['FROM', 'from']))} {base} {draw(st.sampled_from(['AS', 'as']))} s{number}"
        )
        stages.append(f"s{number}")
        for _ in range(draw(st.integers(0, 4))):
            env = st.builds("ENV {}={}".format, NAMES, VALUES)
            others = st.sampled_from(["", "# note", "ENV A b  c", "ONBUILD ARG LATER=1", "WORKDIR /x", "LABEL a=b"])
            lines.append(draw(st.one_of(arg_lines(), arg_lines(), env, HEREDOCS, others)))
    text = "\n".join(lines) + draw(st.sampled_from(["", "\n"]))
    text = text.replace("\n", "\r\n") if draw(st.integers(0, 6)) == 0 else text
    return "\ufeff" + text if draw(st.integers(0, 8)) == 0 else text


@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(text=dockerfiles())
def test_dockerfiles_that_nobody_wrote(outline: Outline, text: str) -> None:
    assert disagreements(outline, text) == []


ATOMS = st.sampled_from(
    [*"ab.1/*?\\\"'${}=x-_é`<[|(~^ ",
     "$A", "${A}", "${B", "${Z", ":-", ":+", "%", "%%", "#", "##", "//", "${A:-", "\\}",
     "${A#*", "${B%.*", "${B%%.*", "${B##*.", "${Z:-\"q $A\"}", "'$A'", "\"$B\"", "$$", "$1", "$@", "${A//", "\\/"]
)  # fmt: skip


@contextlib.contextmanager
def watched_patterns() -> Iterator[list[str]]:
    """Collects every empty pattern that a word trims with: such a word must not be sent to an older engine."""
    empty: list[str] = []
    real = words.trim

    def trim(value: str, pattern: str, *, from_end: bool, greedy: bool) -> str:
        if not pattern and not greedy:
            empty.append(value)
        return real(value, pattern, from_end=from_end, greedy=greedy)

    words.trim = trim  # type: ignore[attr-defined]
    try:
        yield empty
    finally:
        words.trim = real  # type: ignore[attr-defined]


@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(texts=st.lists(st.lists(ATOMS, min_size=1, max_size=7).map("".join), min_size=60, max_size=60))
def test_words_that_nobody_wrote(outline: Outline, texts: list[str]) -> None:
    """Sixty words in one file: an outline takes a third of a second, whatever is in it."""
    head = "ARG A=1.2.3 B=13.0.3-x E="
    lines = [head]
    for number, word in enumerate(texts):
        line = f"ARG V{number}={word}"
        with watched_patterns() as empty:
            alone = read(f"{head}\n{line}\nFROM scratch\n", frontend=outline.frontend)
        clash = any(arg.name in "ABE" for arg in alone.args[3:])
        refused = bool(alone.problems) and outline.frontend >= (1, 8)
        if not (empty or clash or refused or line.rstrip(" \t").endswith("\\")):
            lines.append(line)
    assert disagreements(outline, "\n".join([*lines, "FROM scratch AS s", ""])) == []
