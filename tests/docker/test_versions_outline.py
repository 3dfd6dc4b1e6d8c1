"""The reader of Dockerfile ARGs against BuildKit's own outline, on whatever engine answers.

The outline omits ARGs that a target does not use, so each file is taken apart: for the global scope one file with a
last stage that declares every global ARG anew, for each stage one that ends with it. Bases that are no stage of the
file become `scratch`, so that no registry is asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.daemon import Engine
from pipeline.daemon.manage import buildx_version
from pipeline.run import clean_environment
from pipeline.versions import load
from pipeline.versions.dockerfile import Arg, Dockerfile, read

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases" / "dockerfile_args"
RENDERED = sorted(
    p for p in (ROOT / "docker").iterdir() if "dockerfile" in p.name.lower() and p.suffix != ".dockerignore"
)

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Outline:
    """Asks the engine."""

    engine: Engine
    words: tuple[str, ...]
    env: dict[str, str]

    def __call__(self, text: str, target: str) -> dict[str, tuple[str, int]] | None:
        """Name -> value and line of the ARGs that a target uses; None where BuildKit refuses the file."""
        stages = re.findall(r"(?im)^from\s+\S+\s+as\s+(\S+)", text)
        outside = {name for name in re.findall(r"\bfrom=([a-z][\w.-]*)", text) if name not in stages}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Dockerfile").write_bytes(text.encode())
            contexts = [f"--build-context={name}={folder}" for name in sorted(outside)]
            words = ["docker", "buildx", "build", *self.words, "--output=type=cacheonly", *contexts]
            done = subprocess.run(
                [*words, "--target", target, folder],
                env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
        if done.returncode:
            assert "failed to resolve source metadata" not in done.stderr, text
            return None
        return {
            arg["name"]: (arg.get("value", ""), arg["location"]["ranges"][0]["start"]["line"])
            for arg in json.loads(done.stdout).get("args") or []
        }


@pytest.fixture(scope="session")
def outline(engine: Engine) -> Outline:
    env = clean_environment(engine.environment())
    call = buildx_version() >= (0, 15, 0)  # before, `--print`, which is experimental
    words = ("--call=outline,format=json",) if call else ("--print=outline,format=json",)
    env |= {} if call else {"BUILDX_EXPERIMENTAL": "1"}
    return Outline(engine, words, env)


def first_line(found: Dockerfile, line: int) -> int:
    """The first line of the instruction that stands on a line: the outline names that one."""
    return next(one.start_line for one in found.instructions if one.start_line <= line <= one.end_line)


def without_registry(text: str, found: Dockerfile) -> str:
    """The file with every base that is no stage of it replaced by scratch, and every stage named; lines stay."""
    lines = text.split("\n")
    for stage in found.stages:
        instruction = next(one for one in found.instructions if one.name == "FROM" and one.start_line == stage.line)
        base = instruction.args[0] if stage.parent is not None or stage.base == "scratch" else "scratch"
        end = "\r" if lines[stage.line - 1].endswith("\r") else ""
        lines[stage.line - 1] = f"FROM {base} AS {stage.name or f'zz-stage-{stage.index}'}{end}"
        for number in range(instruction.start_line, instruction.end_line):
            lines[number] = end
    return "\n".join(lines)


def parts(text: str, found: Dockerfile) -> Iterator[tuple[str, str, dict[str, Arg]]]:
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
        label = stage.index if stage.name is None else stage.name
        own = {
            arg.name: arg
            for arg in found.args
            if arg.stage == label
            and arg.name.isidentifier()
            and not (arg.raw is None and (arg.name in globally or arg.name.startswith(("TARGET", "BUILD"))))
        }  # one without default takes another's value, and is shown there or not at all
        yield "\n".join([*lines[:end], ""]), stage.name or f"zz-stage-{stage.index}", own


def disagreements(outline: Outline, text: str) -> list[str]:
    found = read(text)
    bare = without_registry(text, found)
    wrong: list[str] = []
    for file, target, expected in parts(bare, found):
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
            first = first_line(found, arg.line)
            if arg.value is not None and line != first:
                wrong.append(f"{target}: {name} is on line {line}, we read {first}")
        known = {arg.name for arg in found.args}
        wrong += [f"{target}: {name} is missing here" for name in shown if name not in known and name.isidentifier()]
    return wrong


def test_the_engine_is_asked_and_answers(outline: Outline) -> None:
    assert outline("ARG A=1\nFROM scratch AS s\nARG A\nARG B=2\n", "s") == {"A": ("1", 1), "B": ("2", 4)}
    assert outline("FROM scratch AS s\nRUN <<EOF\n", "s") is None


@pytest.mark.parametrize("path", sorted(CASES.glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_cases(outline: Outline, path: Path) -> None:
    assert disagreements(outline, path.read_bytes().decode()) == []


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.name)
def test_every_dockerfile_that_we_render(outline: Outline, path: Path) -> None:
    assert disagreements(outline, path.read_bytes().decode()) == []


def test_versions_json_is_a_bake_variable_file(outline: Outline, tmp_path: Path) -> None:
    versions = load(ROOT)
    args = "".join(f"    {name} = {name}\n" for name in versions)
    (tmp_path / "x.hcl").write_text(f'target "default" {{\n  args = {{\n{args}  }}\n}}\n')
    words = ["docker", "buildx", "bake", "--print", "-f", str(tmp_path / "x.hcl"), "-f", str(ROOT / "versions.json")]
    done = subprocess.run(words, env=outline.env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["target"]["default"]["args"] == dict(versions)
