"""`pipeline versions args` and `pipeline versions pins`: what they print, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from versions_trees import plant, source

from pipeline.__main__ import main


def test_args_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "ARG A=1\nARG B\nFROM scratch\nARG A\nFROM scratch AS last\nARG C=${A:-d}\n"
    path = str(plant(tmp_path, {"Dockerfile": text}) / "Dockerfile")
    assert main(["versions", "args", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"file": path, "line": 1, "stage": None, "name": "A", "value": "1"},
        {"file": path, "line": 2, "stage": None, "name": "B", "value": None},
        {"file": path, "line": 4, "stage": 0, "name": "A", "value": "1"},
        {"file": path, "line": 6, "stage": "last", "name": "C", "value": "d"},
    ]


def test_args_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(plant(tmp_path, {"Dockerfile": "ARG A=1\nFROM scratch AS s\nARG A B=\n"}) / "Dockerfile")
    assert main(["versions", "args", path]) == 0
    assert capsys.readouterr().out == f"{path}:1: A=1\n{path}:3: [s] A=1\n{path}:3: [s] B=\n"


def test_args_of_a_frontend_and_a_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "ARG P=${TARGETPLATFORM}\nFROM scratch\nARG A=1 B=$A\n"
    path = str(plant(tmp_path, {"Dockerfile": text}) / "Dockerfile")
    assert main(["versions", "args", path, "--json", "--frontend", "newest", "--platform", "linux/arm64"]) == 0
    assert [row["value"] for row in json.loads(capsys.readouterr().out)] == ["linux/arm64", "1", "1"]
    assert main(["versions", "args", path, "--json", "--frontend", "1.7"]) == 0
    assert [row["value"] for row in json.loads(capsys.readouterr().out)][1:] == ["1", ""]
    assert main(["versions", "args", path, "--frontend", "seven"]) == 2
    assert "is not a version of docker/dockerfile" in capsys.readouterr().err


def test_args_read_on_after_what_buildkit_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, {"a": 'FROM scratch\nARG A="1\nARG B=2\n', "b": "FROM scratch\nARG C=3\nRUN <<EOF\n"})
    assert main(["versions", "args", str(root / "a"), str(root / "gone"), str(root / "b"), "--json"]) == 2
    captured = capsys.readouterr()
    assert [(row["name"], row["value"]) for row in json.loads(captured.out)] == [("A", None), ("B", "2"), ("C", "3")]
    assert captured.err.splitlines() == [
        f'{root}/a:2: "1: a double quote is not closed',
        f"{root}/gone: cannot be read: No such file or directory",
        f"{root}/b:3: the heredoc <<EOF has no end",
    ]


def test_pins_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a[x]==1 ; python_version > '3' \\\n  --hash=sha256:0\nB_c>=2,<3\nd @ https://example.invalid/d.zip\n-r more.txt\n"
    plant(tmp_path, {"r.txt": text, "more.txt": "e==5\n"})
    monkeypatch.chdir(tmp_path)
    assert main(["versions", "pins", "r.txt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"file": "r.txt", "line": 1, "name": "a", "specifier": "==1", "marker": 'python_version > "3"'},
        {"file": "r.txt", "line": 3, "name": "b-c", "specifier": "<3,>=2", "marker": None},
        {
            "file": "r.txt",
            "line": 4,
            "name": "d",
            "specifier": "",
            "marker": None,
            "url": "https://example.invalid/d.zip",
        },
        {"file": "more.txt", "line": 1, "name": "e", "specifier": "==5", "marker": None},
    ]
    assert main(["versions", "pins", "r.txt"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == 'r.txt:1: a==1 ; python_version > "3"'


def test_pins_with_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"r.txt": "a==1\n-r r.txt\n-r gone.txt\n???\n"})
    monkeypatch.chdir(tmp_path)
    assert main(["versions", "pins", "r.txt", "nothing.txt", "--json"]) == 2
    captured = capsys.readouterr()
    assert [row["name"] for row in json.loads(captured.out)] == ["a"]
    for line in (
        "note: r.txt:3: includes gone.txt, which is not there",
        "r.txt:2: includes itself: ",
        "r.txt:4: '???' is not a requirement",
        "nothing.txt: is missing",
    ):
        assert line in captured.err


def test_a_package_is_told_from_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, {"versions.json": source({"TORCH_VERSION": "2.13.0"})})
    assert main(["versions", "usages", "torch", "--root", str(root)]) == 2
    assert "pipeline versions usages TORCH_VERSION" in capsys.readouterr().err
