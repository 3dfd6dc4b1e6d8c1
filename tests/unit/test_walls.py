"""Which packages may import which, and who starts processes: read from the imports and calls of the code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))

# package -> packages of this project that it may import (`registry` must work on a host with Python and requests alone); `run`, `log` and `home` are single modules
ALLOWED = {
    "contract": set(),
    "cache": {"contract", "flashinfer"},
    "flashinfer": {"contract"},
    "tune": {"contract", "flashinfer", "cache", "run", "log"},
    "start": {"contract", "cache"},
    "run": {"contract", "log"},
    "registry": {"contract", "cache", "run", "home"},
    "log": {"contract"},
}
# Runs inside the image: standard library only, but for torch and flashinfer in tune.
SHIPPED = set(ALLOWED) - {"registry"}
IN_IMAGE = {"tune": {"torch", "flashinfer", "numpy"}, "registry": {"requests", "urllib3", "certifi"}}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> tuple[tuple[str, int], ...]:
    """Absolute dotted names that a file imports, anywhere in it, with their lines."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    package = ["pipeline", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            if base == "pipeline":  # `from pipeline import log`
                yield from ((f"pipeline.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield base, node.lineno


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 40
    assert {room(path) for path in FILES} >= {"contract", "cache", "tune", "daemon", "image", "versions"}


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(name: str) -> None:
    wrong = []
    for path in (p for p in FILES if room(p) == name):
        for target, line in imported(path):
            parts = target.split(".")
            if parts[0] == "pipeline":
                if len(parts) > 1 and parts[1] != name and parts[1] not in ALLOWED[name]:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {target}")
            elif parts[0] == "_typeshed":  # exists for type checkers alone
                continue
            elif parts[0] not in sys.stdlib_module_names and parts[0] not in IN_IMAGE.get(name, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {target}")
    assert wrong == []


def test_the_host_never_imports_torch_or_flashinfer() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in FILES
        if room(path) != "tune"
        for target, line in imported(path)
        if target.split(".")[0] in {"torch", "flashinfer"}
    ]
    assert wrong == []


def test_one_module_starts_processes() -> None:
    starters = {"subprocess", "multiprocessing", "pty"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in FILES
        if path != PACKAGE / "run.py"
        for target, line in imported(path)
        if target.split(".")[0] in starters
    ]
    calls = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            starts = isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
                ("os.system", "os.popen", "os.fork", "os.spawn", "os.posix_spawn")
            )
            if starts:
                calls.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
    assert calls == []


def test_only_main_modules_exit() -> None:
    wrong = []
    for path in FILES:
        if path.name == "__main__.py":
            continue
        tree = parsed(path)
        guarded: set[int] = set()
        for node in tree.body:  # what stands under `if __name__ == "__main__":` is a main module's last line
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                guarded |= {id(inner) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) in guarded or not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) in {"sys.exit", "exit", "quit", "os._exit"}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}")
    assert wrong == []


def test_pydantic_is_imported_lazily_and_on_the_host_alone() -> None:
    wrong = []
    for path in FILES:
        tree = parsed(path)
        for node in tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in {"docker", "rich", "jinja2"} for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {names}")
        if room(path) in SHIPPED and any(t.split(".")[0] == "pydantic" for t, _ in imported(path)):
            wrong.append(f"{path.relative_to(ROOT)}: pydantic in the image")
    assert wrong == []


def test_a_plan_for_a_real_flashinfer_reads_its_version() -> None:
    """A version that such a test spells out fails the pull request that moves the pin, though all is right."""
    seen, wrong = 0, []
    for path in (p for name in ("docker", "tune") for p in sorted((ROOT / "tests" / name).rglob("*.py"))):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Plan":
                values = [*node.args[3:4], *(word.value for word in node.keywords if word.arg == "flashinfer_version")]
                seen += 1
                if any(isinstance(value, ast.Constant) and value.value[:1].isdigit() for value in values):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert seen
    assert wrong == []


def test_ruff_is_content(run_tool) -> None:
    run_tool("ruff", "check", ".")
    run_tool("ruff", "format", "--check", ".")


def test_mypy_strict_is_content(run_tool) -> None:
    run_tool("mypy")


def test_exit_codes_are_unique_and_each_error_has_one() -> None:
    from pipeline.contract import errors
    from pipeline.contract.errors import MEANING, Exit

    assert len({int(code) for code in Exit}) == len(list(Exit))
    assert set(MEANING) == set(Exit)
    families = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.PipelineError)]
    assert len(families) > 5
    assert all(isinstance(family.exit_code, Exit) for family in families)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Neither when they are loaded, nor later, nor for types alone."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    left: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        left[name] = set(modules(path, package.split("."), set(names))) - {name}
    while leaves := {name for name, used in left.items() if not used & set(left)}:
        left = {name: used for name, used in left.items() if name not in leaves}
    while roots := set(left) - {one for used in left.values() for one in used}:
        left = {name: used for name, used in left.items() if name not in roots}
    assert not left, f"in a circle: {', '.join(sorted(left))}"


def modules(path: Path, package: list[str], known: set[str]) -> Iterator[str]:
    """The modules of this project that a file imports: of `from . import x` it is x."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            yield from (one if one in known else base for one in inner)
