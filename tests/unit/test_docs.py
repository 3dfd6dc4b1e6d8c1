"""What the documents claim about the code is read from the code."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
from functools import cache
from pathlib import Path

import pytest
from cache_samples import record, write

from pipeline.__main__ import main, parser_for
from pipeline.contract.errors import Exit, UsageError

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "pipeline").rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "decisions"]
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


def test_every_command_that_a_sentence_names_exists() -> None:
    """`pipeline WORDS` in code marks: a command, and options that it has."""
    wrong = []
    for page in CURRENT:
        for line in re.findall(r"`pipeline ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
            if problem := refused(re.split(" -- | && | \\\\| ", re.sub("'[^']*'", "X", line))[0].split()):
                wrong.append(f"{page.relative_to(ROOT)}: pipeline {line}: {problem}")
    assert wrong == []


def typed() -> list[tuple[str, list[str]]]:
    """Commands that stand on lines of their own, with their pages: in blocks, and the examples of every `--help`.

    Of `[--option VALUE]` and `A|B` the option and A are taken; `…` stands for words that a page leaves out.
    """
    found = []
    for page in CURRENT:
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        for line in re.findall(r"^(?: {4}|)(?:\$ )?(?:\.venv/bin/python -m )?pipeline ([^\n]*)", text, re.MULTILINE):
            plain = re.sub(r"[\[\]]| \| |(?<=\w)\|\S+", " ", line)
            words = [word for word in shlex.split(plain, comments=True) if word != "…"]
            found.append((f"{page.relative_to(ROOT)}: pipeline {line}", words))
    return found


def test_every_command_of_a_block_is_accepted_by_its_parser() -> None:
    wrong = []
    for where, words in typed():
        here = words[: words.index("--")] if "--" in words else words
        try:
            _, unknown = parser_for(here).parse_known_args(here)
        except UsageError as error:
            wrong.append(f"{where}: {error.message}")
        else:
            wrong += [f"{where}: {unknown}"] if unknown else []
    assert wrong == []
    assert len(typed()) > 80


# Commands that need neither an engine nor a registry nor a network. All others of the pages are run by the tests of an
# engine (tests/docker, tests/servers) and of registries (tests/release), with names of their own.
ALONE = re.compile(
    r"plan |init |versions (check $|check --format|usages|args|pins)|explain \S+\.json|"
    r"cache (inspect|diff|merge|export) (?!tuned/|oci:|DIR|\S+ oci:)"
)

# What else than 0 an answer may be, of samples that differ and were made elsewhere.
ENDS = {
    "cache diff": {Exit.OK, Exit.DRIFT},
    "explain autotune_configs.json": {Exit.CACHE},
    "explain other_gpu_same_arch.json": {Exit.CACHE},
}


def test_commands_that_need_nothing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that has what they name: caches, files of caches, a model's config. What `-o` names is new each time."""
    for at, name in enumerate(("h100", "h200", "monday", "tuesday")):
        write(tmp_path / "caches" / name, gpu=f"NVIDIA {name.upper()}" if at < 2 else "", tactic=at)
    (h200,) = (tmp_path / "caches" / "h200").glob("*/*/*")
    for name in ("autotune_configs.json", "rank_0.json", "rank_1.json", "other_gpu_same_arch.json"):
        shutil.copy(h200 / "autotune_configs.json", tmp_path / name)
    (tmp_path / "h200.json").write_text(json.dumps(record("NVIDIA H100").to_json()))
    (tmp_path / "record.json").write_text(json.dumps(record().to_json()))
    shutil.copy(ROOT / "pipeline" / "models" / "Llama-3.1-8B.json", tmp_path / "config.json")
    run, wrong = 0, []
    for where, words in {" ".join(words): (where, words) for where, words in typed()}.values():
        if ALONE.match(f"{shlex.join(words)} ") and "--live" not in words:
            monkeypatch.chdir(ROOT if words[0] == "versions" else tmp_path)
            given = [h200.name[:4] if word == "3f2a" else word for word in words]
            if "-o" in given:
                given[given.index("-o") + 1] = f"new-{run}.json"
            code, run = main(given), run + 1
            wrong += [f"{where}: ends with {code}"] if code not in ENDS.get(" ".join(words[:2]), {Exit.OK}) else []
    assert wrong == []
    assert run > 15


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
    for page in CURRENT:
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
