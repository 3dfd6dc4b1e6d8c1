"""versions.json: what is read, and every slip with its place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from versions_trees import plant, source, texts

from pipeline.__main__ import main
from pipeline.versions import SourceInvalid, load, render, values
from pipeline.versions.render import sync
from pipeline.versions.source import read

ROOT = Path(__file__).resolve().parents[2]
LOCK = {"python": "3.11", "for": "linux"}


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(SourceInvalid) as caught:
        read(text if isinstance(text, bytes) else text.encode())
    assert caught.value.exit_code == 2
    return texts(caught.value.findings)


def test_our_own_file_holds_what_people_decide_on() -> None:
    versions = load(ROOT)
    assert len(versions) <= 12
    assert versions["BASE_IMAGE"] == f"python:{versions['PYTHON_IMAGE_VERSION']}-slim-{versions['DEBIAN_SUITE']}"
    assert versions.packages()["flashinfer-jit-cache"] == "FLASHINFER_VERSION"
    assert set(versions.locks) >= {"host", "dev", "image-cpu", "image-cuda", "compiler-cuda"}
    assert versions.locks["image-cpu"].cpu and not versions.locks["image-cuda"].cpu


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "versions.json:1: is not JSON"),
        ("[]", "versions.json: the file:"),
        ("{}", "versions.json: variable: is missing"),
        ('{"variable": {}}', "versions.json:1: variable:"),
        ('{"variable": {"A": {"default": "1"}}} x', "versions.json:1: is not JSON"),
        ('{"variable": {\n  "A": {"default": "1"},\n}}', "is not JSON: a comma before a closing bracket"),
        ('{"variable": {"A": {"default": 1}}}', "versions.json:1: variable.A.default: must be a string"),
        ('{"variable": {"A": {"default": null}}}', "variable.A.default: must be a string"),
        (source({"A": ""}, {}), "versions.json:3: variable.A.default: is empty"),
        (
            '{"variable": {"A": {"default": "1\\u0007"}}}',
            "variable.A.default: must be one line without control characters",
        ),
        ('{"variable": {"A": {"default": "1\x07"}}}', "versions.json:1: is not JSON: Invalid control character"),
        ('{"variable": {"A": {"default": "$X"}}}', "A: a `$` that begins no ${NAME}"),
        ('{"variable": {\n"A": {"default": "${X}"}}}', "versions.json:2: A names ${X}, which is not there"),
        ('{"variable": {"A": {"default": "${A}"}}}', "versions.json:1: circular reference: A -> A"),
        (source({"A": "${B}", "B": "${C}", "C": "${A}"}), "circular reference: A -> B -> C -> A"),
        ('{"variable": {"A": {}}}', "variable.A.default: is missing"),
        ('{"variable": {"A": {"defualt": "1"}}}', 'unknown key "defualt"; did you mean "default"?'),
        ('{"variables": {}}', 'unknown key "variables"; did you mean "variable"?'),
        ('{"variable": {"1A": {"default": "1"}}}', "'1A' cannot be the name of an ARG"),
        ('{"variable": {"A": {"default": "1"},\n"A": {"default": "2"}}}', 'versions.json:2: "A" is there twice'),
        (
            source({"TORCH_VERSION": "1"}, {"TORCH_VERSON": {}}),
            'no variable TORCH_VERSON; did you mean "TORCH_VERSION"?',
        ),
        (source({"A": "1"}, {"A": {"pakages": ["a"]}}), 'unknown key "pakages"; did you mean "packages"?'),
        (source({"A": "1"}, {"A": {"packages": [1]}}), "must be a string"),
        (source({"A": "1"}, {"A": {"begins_with": "B"}}), "A begins with B, which is not there"),
        (
            source({"A": "1", "B": "1"}, {"A": {"packages": ["x"]}, "B": {"packages": ["X"]}}),
            "x is governed by A and by B",
        ),
        (source({"A": "1.x"}, {"A": {"packages": ["a"]}}), "A is '1.x', which is no version of a package"),
        (source({"A": "v0.7.4"}, {"A": {"packages": ["a"]}}), "A is 'v0.7.4', which is no version of a package"),
        (
            source({"P": "3.12", "I": "3.11.4"}, {"I": {"begins_with": "P"}}),
            "I is 3.11.4, which does not begin with P 3.12",
        ),
        (source({"A": "1"}, {}, locks={"x": {**LOCK, "for": "mars"}}), "locks.x.for:"),
        (source({"A": "1"}, {}, locks={"x": {**LOCK, "python": "new"}}), "x is for Python 'new', which is no version"),
        (source({"A": "1"}, {}, locks={"../x": LOCK}), "locks.../x:"),
        ("\ufeff" + source({"A": "1"}), "versions.json:1: begins with a byte order mark"),
        (b'{"variable": {\n"A": {"default": "\xff"}}}', "versions.json:2: is not UTF-8 from here on"),
        ("[" * 100000, "nested too deeply"),
    ],
)
def test_a_slip_has_its_place(text: str | bytes, expected: str) -> None:
    found = problems(text)
    assert any(expected in line for line in found), found
    assert all("\n" not in line for line in found)


def test_all_slips_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"variable": {\n "A": {"default": 1},\n "A": {"default": "2"},\n "D": {"defalt": "2"}\n}, "govern": {}}'
    assert [line.rpartition("versions.json:")[2][:2] for line in problems(text)] == ["3:", "4:", "4:", "5:"]
    plant(tmp_path, {"versions.json": text})
    for words in (["check", "--format", "github"], ["sync"], ["bump", "A=2"], ["usages", "A"]):
        assert main(["versions", *words, "--root", str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["versions.json"]


def test_a_missing_or_unreadable_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match="there is no"):
        load(tmp_path)
    (tmp_path / "versions.json").mkdir()
    with pytest.raises(SourceInvalid, match="cannot be read: no ordinary file"):
        load(tmp_path)


@pytest.mark.parametrize("depth", [30, 60])
def test_a_value_that_doubles_without_end_is_refused(depth: int) -> None:
    doubling = {f"A{n}": f"${{A{n + 1}}}${{A{n + 1}}}" for n in range(depth)} | {f"A{depth}": "1"}
    assert any("is longer than" in line for line in problems(source(doubling)))


@settings(deadline=None)  # the machine may be busy
@given(st.one_of(st.text(), st.text(alphabet='{}[]":,\\ \n1ae', max_size=80).map('{"variable": '.__add__)))
def test_no_text_makes_it_raise_anything_else(text: str) -> None:
    try:
        read(text.encode("utf-8", "surrogatepass"))
    except SourceInvalid as error:
        assert error.findings


# ---- templates

TEMPLATED = {
    "versions.json": source({"A_VERSION": "1.2", "B": "x-${A_VERSION}"}, {}),
    "templates/Dockerfile.j2": "ARG A_VERSION={{ A_VERSION }}\nFROM scratch\nARG B={{ B }}\n",
    "templates/requirements/all.in.j2": "{% if true %}\na=={{ A_VERSION }}\n{% endif %}\n",
    "templates/_part.j2": "never rendered",
}
LOOP = "{% for a in range(99999) %}"


def test_sync_writes_whole_files_once_and_deletes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, TEMPLATED)
    assert sync(root, load(root)) == ["docker/Dockerfile", "requirements/all.in"]
    assert (root / "docker/Dockerfile").read_text() == "ARG A_VERSION=1.2\nFROM scratch\nARG B=x-1.2\n"
    assert not (root / "docker/_part").exists()
    plant(root, {"docker/by-hand": "kept"})
    before = (root / "docker/Dockerfile").stat().st_mtime_ns
    assert sync(root, load(root)) == []
    assert (root / "docker/Dockerfile").stat().st_mtime_ns == before and (root / "docker/by-hand").exists()
    (root / "docker/Dockerfile").write_text("FROM scratch\n")
    assert main(["versions", "check", "--root", str(root)]) == 3
    out = capsys.readouterr().out
    assert "docker/Dockerfile:1: differs from its template; run `pipeline versions sync`" in out
    assert "+ARG A_VERSION=1.2" in out
    assert main(["versions", "check", "--fix", "--root", str(root)]) == 0
    assert "wrote docker/Dockerfile" in capsys.readouterr().err


def test_sync_writes_nothing_through_a_link_out_of_the_tree(tmp_path: Path) -> None:
    root = plant(tmp_path / "tree", TEMPLATED)
    outside = plant(tmp_path, {"outside": "untouched"}) / "outside"
    (root / "docker").mkdir()
    (root / "docker/Dockerfile").symlink_to(outside)
    assert main(["versions", "sync", "--root", str(root)]) == 2
    assert outside.read_text() == "untouched"


@pytest.mark.parametrize("what", ["a directory", "a link in a circle"])
def test_sync_writes_all_files_or_none(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, {**TEMPLATED, "docker/Dockerfile": "FROM before\n"})
    (root / "requirements" / "all.in").mkdir(parents=True)
    if what != "a directory":
        (root / "requirements" / "all.in").rmdir()
        (root / "requirements" / "all.in").symlink_to("all.in")
    assert main(["versions", "sync", "--root", str(root)]) == 2
    assert capsys.readouterr().err.startswith("error: requirements/all.in cannot be written: ")
    assert (root / "docker/Dockerfile").read_text() == "FROM before\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("x\n{{ A_VERSIN }}", "templates/Dockerfile.j2:2: A_VERSIN has no version in versions.json; did you mean"),
        ("{{ A_VERSION }", "templates/Dockerfile.j2:1: is not a template"),
        ("{{ B.x.y }}", "templates/Dockerfile.j2: cannot be rendered"),
        ("{{ A_VERSION + 1 }}", "templates/Dockerfile.j2: cannot be rendered"),
        (b"\xff", "templates/Dockerfile.j2: is not UTF-8"),
        ('{% include "gone" %}', "templates/Dockerfile.j2: cannot be rendered: "),
        ('{% include "Dockerfile.j2" %}', "templates/Dockerfile.j2: cannot be rendered: it includes itself"),
        (f"{9 * LOOP}{9 * '{% endfor %}'}", "templates/Dockerfile.j2: cannot be rendered: it takes over 1 second"),
        ("{{ 'x' * 10 ** 15 }}", "templates/Dockerfile.j2: cannot be rendered: MemoryError"),
        ("{{ ''.__class__.__mro__ }}", "templates/Dockerfile.j2: cannot be rendered: access to attribute"),
    ],
    ids=range(10),
)
def test_a_bad_template_has_its_place(
    tmp_path: Path,
    template: str | bytes,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render, "_SECONDS", 1)
    root = plant(tmp_path, {**TEMPLATED, "templates/Dockerfile.j2": template})
    assert main(["versions", "check", "--root", str(root)]) == 2
    assert any(line.startswith(expected) for line in capsys.readouterr().out.splitlines())
    assert main(["versions", "sync", "--root", str(root)]) == 2
    assert not (root / "docker").exists()


@pytest.mark.parametrize("path", ["templates/Dockerfile.j2", "docker/Dockerfile"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, {name: text for name, text in {**TEMPLATED, "docker/x": ""}.items() if name != path})
    os.mkfifo(root / path)
    assert main(["versions", "check", "--root", str(root)]) in (2, 3)
    assert f"{path}: cannot be read: no ordinary file" in capsys.readouterr().out


def test_values_are_those_of_the_file_and_a_bad_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "versions.json"
    for version in ("1.0", "2.0"):
        names = {"A_VERSION": {"default": version}, "B": {"default": "x-${A_VERSION}"}}
        file.write_text(json.dumps({"variable": names}))
        for _ in range(2):  # known by its content the second time
            assert values(tmp_path) == {"A_VERSION": version, "B": f"x-{version}"}
    file.write_text("{")
    with pytest.raises(SourceInvalid):
        values(tmp_path)
    file.unlink()
    with pytest.raises(SourceInvalid, match=r"there is no versions\.json"):
        values(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/x")  # nothing can be kept there
    file.write_text('{"variable": {"A_VERSION": {"default": "3"}}}')
    assert values(tmp_path) == {"A_VERSION": "3"}
