"""What the documents claim about the code is read from the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "pipeline").rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = (ROOT / "docs" / "paths.md").read_text(encoding="utf-8")

# Strings that are no places: parts of other paths, patterns, and URLs of the Engine API and of registries.
NOT_PLACES = re.compile(
    r"^/(_ping|version|info|images|containers|stat|ca.pem|cert.pem|key.pem|v2|blobs|manifests|referrers|tags)\b|^/$|^//|[{}<>()?\\*%:]| "
)


def variables_read() -> dict[str, str]:
    """Names of environment variables that the code reads by name, with a place for each."""
    found: dict[str, str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name: ast.expr | None = None
            if isinstance(node, ast.Call) and node.args:
                function = ast.unparse(node.func)
                if function.endswith(("environ.get", "os.getenv", "env.get", "environment.get")):
                    name = node.args[0]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("os.environ"):
                name = node.slice
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("ENV_"):
                name = node.value
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found[name.value] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def paths_named() -> dict[str, str]:
    """Absolute paths that stand in the code as whole strings, with a place for each."""
    found: dict[str, str] = {}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.startswith("/") and not NOT_PLACES.search(text):
                found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def test_every_variable_that_is_read_is_documented() -> None:
    found = variables_read()
    assert len(found) > 5
    missing = {name: place for name, place in found.items() if f"`{name}`" not in PATHS}
    assert missing == {}


def test_every_absolute_path_is_documented() -> None:
    found = paths_named()
    assert len(found) > 10
    missing = {name: place for name, place in found.items() if name.rstrip("/") not in PATHS}
    assert missing == {}


def test_every_folder_of_the_cache_home_is_documented() -> None:
    folders = set()
    for path in FILES:
        for match in re.finditer(r"\bhome / \"([a-z]+)\"", path.read_text(encoding="utf-8")):
            folders.add(match.group(1))
    assert folders >= {"wheels", "contexts", "verdicts"}
    assert {name for name in folders if f"`{name}/" not in PATHS} == set()


def test_the_readme_lists_every_exit_code_and_make_variable() -> None:
    from pipeline.contract.exits import MEANING

    for code, meaning in MEANING.items():
        assert re.search(rf"^\| {code.value} \| {re.escape(meaning)}", README, re.MULTILINE), code
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    variables = {
        *re.findall(r"\b([A-Z_]+)=[a-z-]+", makefile),
        *re.findall(r"call switch,([A-Z_]+)", makefile),
        "PYTHON",
    }
    assert len(variables) > 30
    assert {name for name in variables if f"`{name}`" not in README} == set()


def test_every_make_target_and_command_is_in_the_readme() -> None:
    from pipeline.commands import commands

    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name in targets if f"make {name}" not in README} == set()
    inner = {" ".join(name) for name, _ in commands()}
    missing = {name for name in inner if f"pipeline {name}" not in README and f"`{name.split()[-1]}`" not in README}
    assert missing == set()


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
