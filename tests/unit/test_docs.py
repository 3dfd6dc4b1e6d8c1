"""What the documents claim about the code is read from the code."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "pipeline").rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))
PATHS = (ROOT / "docs" / "reference" / "paths.md").read_text(encoding="utf-8")

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


def test_every_make_target_and_variable_is_documented() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "reference" / "make.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    variables = {
        *re.findall(r"\b([A-Z_]+)=[a-z-]+", makefile),
        *re.findall(r"call switch,([A-Z_]+)", makefile),
        "PYTHON",
    }
    assert len(targets) > 10
    assert len(variables) > 30
    assert {name for name in targets if f"`make {name}`" not in page} == set()
    assert {name for name in variables if f"`{name}`" not in page} == set()


def test_the_page_of_commands_is_what_the_parser_says() -> None:
    assert REFERENCE["page"]() == (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8"), (
        "run `make docs`"
    )


def test_every_command_that_a_page_names_exists() -> None:
    """`pipeline WORDS` in code marks, and commands of code blocks, name a command and options that it has."""
    wrong = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "decisions"):
        text = page.read_text(encoding="utf-8")
        typed = re.findall(r"^(?: {4}|\$ |)(?:\$ )?(?:\.venv/bin/python -m )?pipeline ([^#\n]*)", text, re.MULTILINE)
        for line in [*re.findall(r"`pipeline ([a-z][^`]*)`", text), *typed]:
            if problem := refused(re.split(" -- | && | \\\\| ", re.sub("'[^']*'", "X", line))[0].split()):
                wrong.append(f"{page.relative_to(ROOT)}: pipeline {line}: {problem}")
    assert wrong == []


def test_every_make_command_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE), ".venv/ready", ".venv/dev", ".venv-tune/ready"}
    named = {*re.findall(r"\b([A-Z_]+)=[a-z-]+", makefile), *re.findall(r"\b[A-Z_]{2,}\b", makefile)}
    wrong = []
    for page in PAGES:
        for line in re.findall(r"(?:^ {4}|`)make ([^`#\n]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            words = re.sub("'[^']*'", "X", line).split()
            variables = {word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)}
            if words[0] not in targets or variables - named:
                wrong.append(f"{page.relative_to(ROOT)}: make {line}")
    assert wrong == []


@cache
def options_of(name: tuple[str, ...]) -> set[str]:
    return {option for action in REFERENCE["parser_of"](name)._actions for option in action.option_strings}


def refused(words: list[str]) -> str:
    """Why these words name no command of `pipeline`, or an option that it does not have."""
    from pipeline.commands import commands

    names = [name for name, _ in commands()]
    known = [name for name in names if list(name) == words[: len(name)]]
    if not known:
        return "" if words in [[name[0]] for name in names] else "no such command"
    options = options_of(known[0])
    given = {word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    return ", ".join(sorted(given - options))


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            to = page.parent / target if target else page
            if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", one).lower()).replace(" ", "-") for one in headings}


def test_every_page_is_linked_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [
        str(page)
        for page in pages
        if page.name != "README.md" and page.parts[0] != "decisions" and f"({page})" not in index
    ] == []


def test_the_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 90


def test_modules_and_files_that_pages_name_exist() -> None:
    missing = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "decisions"):
        text = page.read_text(encoding="utf-8")
        files = re.findall(r"`((?:pipeline|tests|bench|templates|\.github|\.ci)/[\w./-]+)`", text)
        modules = [
            f"{name.replace('.', '/')}" for name in re.findall(r"python -m ((?:pipeline|tests|bench)[.\w]*)", text)
        ]
        missing += [
            f"{page.relative_to(ROOT)}: {name}"
            for name in [*files, *modules]
            if "NAME" not in name and not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()
        ]
    assert missing == []


def test_pages_that_the_code_names_exist() -> None:
    named = {
        (str(path.relative_to(ROOT)), match)
        for folder in ("pipeline", "templates", "tests", ".github", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
        for match in re.findall(r"\bdocs/[\w/.-]+\.md\b", path.read_text(encoding="utf-8", errors="replace"))
    }
    assert len(named) > 3
    assert {(path, page) for path, page in named if not (ROOT / page).exists()} == set()
