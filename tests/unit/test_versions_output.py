"""What people see: nothing that a terminal obeys, one `error:` line, and numbers that read well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from versions_trees import plant, source

from pipeline.__main__ import main
from pipeline.versions.findings import counted, printable, printable_diff

NAME = "a\x1b[31m\u202e\n"
SHOWN = "a\\x1b[31m\\u202e\\n"


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """What a command prints as text, none of which a terminal obeys."""
    main(words)
    captured = capsys.readouterr()
    whole = captured.out + captured.err
    assert not any(character in whole for character in "\x1b\x07\r\u202e")
    return whole


def test_args_and_pins_escape_names_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docker = "FROM scratch\nARG A=\x1b]0;x\x07\nARG B='\x07\nFOO\x1b x\n"
    root = plant(tmp_path, {NAME: docker, f"{NAME}.txt": "a==1\n???\x1b\n-r \x1b.txt\n-r " + NAME.strip() + "\n"})
    args = said(capsys, ["versions", "args", str(root / NAME), str(root / "gone\x1b")])
    assert f"{root}/{SHOWN}:2: [0] A=\\x1b]0;x\\x07\n" in args
    assert f"{root}/gone\\x1b: cannot be read" in args
    pins = said(capsys, ["versions", "pins", str(root / f"{NAME}.txt")])
    assert f"{root}/{SHOWN}.txt:1: a==1\n" in pins
    assert "includes \\x1b.txt, which is not there" in pins


def test_check_where_sync_and_bump_escape_paths_and_diffs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(
        tmp_path,
        {
            "versions.json": source({"A_VERSION": "1.2"}),
            f"templates/{NAME}.j2": "ARG A_VERSION={{ A_VERSION }}\t# \x1b[2J\nFROM scratch\n",
        },
    )
    assert f"docker/{SHOWN}\n" in said(capsys, ["versions", "sync", "--root", str(root)])
    assert f"docker/{SHOWN}:1: ARG: ARG A_VERSION=1.2" in said(
        capsys, ["versions", "usages", "A_VERSION", "--root", str(root)]
    )
    bumped = said(capsys, ["versions", "bump", "A_VERSION=1.3", "--root", str(root), "--offline"])
    assert f"--- docker/{SHOWN} (before)\n" in bumped
    assert "+ARG A_VERSION=1.3\t# \\x1b[2J\n" in bumped
    plant(root, {f"docker/{NAME}": "ARG A_VERSION=1.3\r\x1b\nFROM scratch\n"})
    checked = said(capsys, ["versions", "check", "--root", str(root)])
    assert f"--- docker/{SHOWN} (committed)\n" in checked
    assert "\n-ARG A_VERSION=1.3\\r\\x1b\n" in checked
    assert "\\x1b" in said(capsys, ["versions", "check", "--root", str(root), "--format", "github"])
    assert f"wrote docker/{SHOWN}" in said(capsys, ["versions", "check", "--fix", "--root", str(root)])


def test_audit_escapes_names_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, {f"{NAME}/Dockerfile": "FROM a\nARG X_VERSION=1\x1b\nFROM b\nARG X_VERSION=2.0\n"})
    assert f"  1\\x1b  {SHOWN}/Dockerfile:2 (ARG X_VERSION)" in said(capsys, ["versions", "audit", str(root)])
    assert "\\x1b does not exist" in said(capsys, ["versions", "audit", str(root / "\x1b")])


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / os.fsdecode(b"\xff.Dockerfile")
    path.write_text("FROM scratch\nARG A=1\n")
    assert "\\udcff.Dockerfile:2: [0] A=1" in said(capsys, ["versions", "args", str(path)])
    assert printable("\ud800") == "\\ud800"


def test_a_diff_keeps_its_lines_and_tabs() -> None:
    assert printable_diff("-\ta\r\n+\x0cb\n") == "-\ta\\r\n+\\x0cb\n"


def test_one_and_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [counted(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    root = plant(tmp_path, {"Dockerfile": "FROM a\nARG X_VERSION=1.0\nFROM b\nARG X_VERSION=2.0\n"})
    assert "1 finding in 1 of 1 file\n" in said(capsys, ["versions", "audit", str(root)])
    plant(root, {"versions.json": source({"X_VERSION": "1.0"}), "templates/a.j2": "{{ X_VERSION }}"})
    assert "1 file changed" in said(capsys, ["versions", "sync", "--root", str(root)])


@pytest.mark.parametrize("fix", [(), ("--fix",)])
def test_what_cannot_be_used_ends_with_one_error_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fix: tuple[str, ...]
) -> None:
    plant(tmp_path, {"versions.json": '{"variable": {"A": {"default": 1}}}'})
    assert main(["versions", "check", "--root", str(tmp_path), *fix]) == 2
    captured = capsys.readouterr()
    assert captured.out == 'versions.json:1:32: the value of "A" must be a string in double quotes\n'
    assert captured.err.splitlines() == [
        "error: versions.json cannot be used: 1 error",
        "hint: correct versions.json, then run `pipeline versions check`",
    ]
    plant(tmp_path, {"versions.json": source({"A": "1"}), "templates/a.j2": "{{ A }}{{ B }}{{ C }}"})
    assert main(["versions", "check", "--root", str(tmp_path), *fix]) == 2
    captured = capsys.readouterr()
    assert "templates/a.j2:1: B has no version in versions.json" in captured.out
    assert captured.err.splitlines()[-2].startswith("error: templates/ cannot be used: ")
    assert (
        captured.err.splitlines()[-1] == "hint: correct templates/ or versions.json, then run `pipeline versions sync`"
    )
