"""`versions check`, cold, and `versions audit` on generated trees of 1,000, 10,000 and 50,000 files."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pipeline

from .measure import Figures, many, say

SIZES = (1_000, 10_000, 50_000)
_PIPELINE = (sys.executable, "-m", "pipeline")


def _python(r: random.Random) -> tuple[str, bytes]:
    lines = [f"def function_{n}(value):\n    return value * {n}\n" for n in range(r.randint(5, 60))]
    if r.random() < 0.02:
        lines.insert(0, f'PART_VERSION = "1.{r.randint(0, 9)}"\n')
    return f"module_{r.random():.9f}.py", "\n".join(lines).encode()


def _yaml(r: random.Random) -> tuple[str, bytes]:
    command = "docker build --build-arg CUDA_VERSION=13.0.3 ." if r.random() < 0.2 else "make test"
    steps = "".join(f"  - name: step {n}\n    run: {command}\n" for n in range(r.randint(2, 30)))
    return f"job_{r.random():.9f}.yml", f"on: push\nsteps:\n{steps}".encode()


def _shell(r: random.Random) -> tuple[str, bytes]:
    return f"run_{r.random():.9f}.sh", ("set -e\nexport CUDA_VERSION=13.0.3\n" + "echo line\n" * 40).encode()


def _dockerfile(r: random.Random) -> tuple[str, bytes]:
    body = "".join(f"RUN apt-get update && \\\n    apt-get install -y package{n}\n" for n in range(10))
    text = f"ARG CUDA_VERSION=13.0.3\nFROM nvidia/cuda:${{CUDA_VERSION}}-devel AS base\n{body}FROM base\nCOPY . .\n"
    return f"Dockerfile.{r.random():.9f}", text.encode()


def _requirements(r: random.Random) -> tuple[str, bytes]:
    rows = [f"package-{n}=={n}.{n % 7}.{n % 3}" for n in range(r.randint(3, 60))]
    return f"requirements-{r.random():.9f}.txt", "\n".join(rows).encode()


def _markdown(r: random.Random) -> tuple[str, bytes]:
    return f"page_{r.random():.9f}.md", b"# Title\n\nCUDA_VERSION=12.0\n" * 20


def _binary(r: random.Random) -> tuple[str, bytes]:
    return f"weights_{r.random():.9f}.bin", r.randbytes(4096)


# Shares as in large repositories of this field: mostly code, some build files.
_KINDS: tuple[tuple[float, Callable[[random.Random], tuple[str, bytes]]], ...] = (
    (0.70, _python), (0.10, _yaml), (0.05, _shell), (0.02, _dockerfile), (0.03, _requirements), (0.07, _markdown),
    (0.03, _binary),
)  # fmt: skip


def generate(root: Path, files: int) -> None:
    """Write a tree of that many files, the same each time, in which CUDA disagrees once."""
    r = random.Random(files)  # noqa: S311 -- the same tree each time
    weights, makers = zip(*_KINDS, strict=True)
    for number in range(files - 1):
        folder = root / f"part{number % 97}" / f"room{number % 11}"
        folder.mkdir(parents=True, exist_ok=True)
        name, data = r.choices(makers, weights)[0](r)
        (folder / name).write_bytes(data)
    (root / "Dockerfile").write_text(
        "ARG CUDA_VERSION=13.0.2\nFROM nvidia/cuda:${CUDA_VERSION}-base\n", encoding="utf-8"
    )


# What a user has: Python writes the byte code of modules at their first import. Empty is as good as not set.
_USER = {"PYTHONDONTWRITEBYTECODE": ""}


def without_byte_code(folder: Path) -> Figures:
    """The check by a copy of our modules that nobody has imported yet, nor will: each run compiles them."""
    package = Path(pipeline.__file__).parent
    shutil.copytree(package, folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from pipeline.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "check", "--root", str(package.parent)]
    return many(command, runs=15, env={"PYTHONDONTWRITEBYTECODE": "1"})


def main() -> None:
    """Print medians."""
    say("pipeline versions check, cold", many([*_PIPELINE, "versions", "check"], runs=15, env=_USER))
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as folder:
        say("pipeline versions check, cold, no byte code of ours", without_byte_code(Path(folder)))
    say("python -c pass", many([sys.executable, "-c", "pass"], runs=15))
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as folder:
            generate(Path(folder), size)
            say(
                f"pipeline versions audit, {size:,} files",
                many([*_PIPELINE, "versions", "audit", folder], runs=5, env=_USER),
            )


if __name__ == "__main__":
    main()
