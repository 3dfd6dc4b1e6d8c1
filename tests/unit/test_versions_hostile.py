"""Trees that mean harm, or are merely broken: one clear line each, no traceback, no waiting for ever."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from versions_trees import plant, source, texts

from pipeline.__main__ import main
from pipeline.versions import SourceInvalid, drift, load
from pipeline.versions.audit import look
from pipeline.versions.source import read

REACHED = "ARG TORCH_VERSION=2.13.0\nFROM scratch\n"


def tree(tmp_path: Path, files: dict[str, str | bytes] | None = None) -> Path:
    base: dict[str, str | bytes] = {
        "versions.json": source({"TORCH_VERSION": "2.13.0"}),
        "docker/Dockerfile": REACHED,
    }
    return plant(tmp_path / "tree", {**base, **(files or {})})


def problems(text: str) -> list[str]:
    with pytest.raises(SourceInvalid) as caught:
        read(text.encode())
    return texts(caught.value.findings)


@pytest.mark.parametrize("path", ["docker/pipe", "requirements/pipe.txt"])
def test_a_fifo_is_not_waited_for(tmp_path: Path, path: str) -> None:
    root = tree(tmp_path, {"requirements/a.txt": "six==1.0\n"})
    os.mkfifo(root / path)
    assert texts(drift(root)) == [f"{path}: is no ordinary file"]


def test_a_fifo_as_source_in_an_audit_and_for_args(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "versions.json")
    with pytest.raises(SourceInvalid, match=r"versions.json: is no ordinary file"):
        load(tmp_path)
    assert texts(look(tmp_path).unreadable) == ["versions.json: is no ordinary file"]
    os.mkfifo(tmp_path / "p.txt")
    assert main(["versions", "args", str(tmp_path / "p.txt")]) == 2
    assert main(["versions", "pins", str(tmp_path / "p.txt")]) == 2
    assert capsys.readouterr().err.count("p.txt: is no ordinary file") == 2


def test_what_is_no_ordinary_file_among_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "ARG TORCH_VERSION={{ TORCH_VERSION }}\nFROM scratch\n"
    root = tree(tmp_path, {"templates/Dockerfile.j2": template, "templates/sub/in.j2": '{% include "sub/plain" %}'})
    os.mkfifo(root / "templates/pipe.j2")
    os.mkfifo(root / "templates/sub/plain")
    (root / "templates/zero.j2").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(root / "templates")  # an address is at most 107 bytes long
        try:
            one.bind("sock.j2")
        finally:
            os.chdir(here)
    for words in (
        ["versions", "check"],
        ["versions", "sync"],
        ["versions", "usages", "TORCH_VERSION"],
        ["versions", "bump", "--offline", "TORCH_VERSION=3.0"],
    ):
        assert main([*words, "--root", str(root)]) == 2
        captured = capsys.readouterr()
        for name in ("pipe.j2", "sub/plain", "sock.j2"):
            assert f"templates/{name}: is no ordinary file" in captured.out + captured.err
        assert "templates/zero.j2: is a link out of the tree" in captured.out + captured.err


@pytest.mark.parametrize("gone", ["templates/Dockerfile.j2", "docker/Dockerfile", "requirements/a.txt"])
def test_a_file_that_vanishes_while_the_tree_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gone: str
) -> None:
    template = "ARG TORCH_VERSION={{ TORCH_VERSION }}\nFROM scratch\n"
    root = tree(tmp_path, {"templates/Dockerfile.j2": template, "requirements/a.txt": "# none\n"})
    real = os.stat

    def vanish(path: str | os.PathLike[str], **options: bool) -> os.stat_result:
        """The file is listed, and is gone by the time that it is looked at."""
        if str(path) == str(root / gone):
            Path(path).unlink(missing_ok=True)
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", vanish)
    if not gone.startswith("templates"):
        assert main(["versions", "audit", str(root)]) == 0
        assert f"note: {gone}: cannot be read: No such file or directory" in capsys.readouterr().err
        plant(root, {gone: "# none\n" if gone.endswith("txt") else REACHED})
    assert main(["versions", "check", "--root", str(root)]) in (2, 3)
    assert f"{gone}: is missing" in capsys.readouterr().out
    monkeypatch.undo()
    assert not (root / gone).exists()


@pytest.mark.parametrize("coding", ["idna", "punycode", "hex"])
def test_a_codec_that_refuses_to_replace(tmp_path: Path, coding: str) -> None:
    root = tree(tmp_path, {"requirements/a.txt": b"# coding: " + coding.encode() + b"\nsix==1.0\xff\n"})
    assert any("is not text in UTF-8" in text for text in texts(drift(root)))


def test_nothing_hides_behind_a_nul_or_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lie = "ARG TORCH_VERSION=1.0\nFROM scratch\n"
    files = {"a.Dockerfile": f"# \0\n{lie}", "b.Dockerfile": lie + "#\n" * (1 << 21), "c.hcl": "# \0", "d.bin": "\0"}
    root = tree(tmp_path, {f"docker/{name}": text for name, text in files.items()})
    assert texts(drift(root)) == [
        "docker/a.Dockerfile: is no text",
        "docker/b.Dockerfile: is too large to be looked at",
        "docker/c.hcl: is no text",
    ]
    assert main(["versions", "args", str(root / "docker/a.Dockerfile")]) == 2
    assert capsys.readouterr().err == f"{root}/docker/a.Dockerfile: is no text\n"


def test_args_of_utf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plant(tmp_path, {"Dockerfile": REACHED.encode("utf-16")}) / "Dockerfile"
    assert main(["versions", "args", str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: is UTF-16, which BuildKit does not read\n"


def test_a_source_that_is_a_link_out_of_the_tree(tmp_path: Path) -> None:
    outside = plant(tmp_path / "outside", {"v.json": source({"TORCH_VERSION": "2.13.0"})}) / "v.json"
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "versions.json").symlink_to(outside)
    with pytest.raises(SourceInvalid, match="is a link out of the tree"):
        load(tmp_path / "inside")


@pytest.mark.parametrize(
    "text",
    ["TORCH_VERSION=2.13.0\n" * 20_000, "a[" * 100_000, "RUN <<E\n" + "TORCH_VERSION=2.13.0\n" * 20_000 + "E\n"],
    ids=["hits", "brackets", "heredoc"],
)
def test_time_grows_with_the_size_of_a_file(tmp_path: Path, text: str) -> None:
    path = "docker/Dockerfile.r" if text.startswith("RUN") else "docker/r.txt"
    root = tree(tmp_path, {path: f"FROM scratch\n{text}" if text.startswith("RUN") else text})
    began = time.process_time()
    assert texts(drift(root)) == []
    assert time.process_time() - began < 5  # quadratic, each takes more than that


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("docker/Dockerfile.x", [f"ARG A{number}=$A{number - 1}\nRUN echo $A1" for number in range(10_000)]),
        ("docker/Dockerfile.x", [f"ENV A{number}=1\nONBUILD ARG A{number}" for number in range(10_000)]),
        ("docker/Dockerfile.x", [f"ENV A{number}=1\nFROM s{number} AS s{number + 1}" for number in range(10_000)]),
        ("docker/Dockerfile.x", [f"RUN echo {number} \\\n  && true" for number in range(10_000)]),
        ("requirements/a.txt", [f"p{number}==1.0 \\\n  --hash=sha256:0" for number in range(10_000)]),
    ],
    ids=["args", "onbuild", "stages", "runs", "pins"],
)
def test_a_file_of_twenty_thousand_lines(tmp_path: Path, path: str, lines: list[str]) -> None:
    above = "FROM scratch AS s0\n" if "docker" in path else ""
    root = tree(tmp_path, {path: above + "\n".join(lines) + "\n"})
    began = time.process_time()
    assert texts(drift(root)) == []
    assert time.process_time() - began < 15  # quadratic, it takes minutes


def test_a_long_row_of_files_that_include_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {f"requirements/r{number}.txt": f"-r r{number + 1}.txt\n" for number in range(60)})
    assert texts(drift(root))[-1] == "requirements/r59.txt:1: includes r60.txt, behind 50 other files"
    assert main(["versions", "pins", str(root / "requirements/r0.txt")]) == 2
    assert capsys.readouterr().err == f"{root}/requirements/r50.txt:1: includes r51.txt, behind 50 other files\n"


def test_every_line_of_a_text_is_counted(tmp_path: Path) -> None:
    text = "a\nTORCH_VERSION=1.0\nb \\\n TORCH_VERSION=1.1\n\nTORCH_VERSION=1.2"
    found = drift(tree(tmp_path, {"docker/r.txt": text}))
    assert [finding.line for finding in found] == [2, 4, 6]


@pytest.mark.parametrize(
    "where", ['{"variable": {"A\\ud800": {"default": "1"}}}', '{"variable": {"A": {"default": "\\udc00"}}}']
)
def test_half_a_surrogate_pair(where: str) -> None:
    assert any("half of a surrogate pair" in text for text in problems(where))


def test_half_a_surrogate_pair_in_a_bake_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bake = '{"variable": {"TORCH_VERSION": {"default": "\\ud800"}}}'
    assert main(["versions", "check", "--root", str(tree(tmp_path, {"docker/b.json": bake}))]) == 3
    assert "docker/b.json:1: half of a surrogate pair" in capsys.readouterr().out
    whole = '{"variable": {"X": {"default": "\\ud83d\\ude00"}}}'
    assert texts(drift(tree(tmp_path, {"docker/b.json": whole}))) == []


@pytest.mark.parametrize(
    "label", ["{major[x]}", "{major:9999999999}", "{major!r}", "{{major}}", "{", "cu{}", "{minor.x}"]
)
def test_a_label_holds_plain_places_only(label: str) -> None:
    text = source({"A_VERSION": "1.2"}, {"A_VERSION": {"local_label": [label]}})
    assert any('"local_label" of "A_VERSION" may hold' in one for one in problems(text))


def test_a_number_of_too_many_digits() -> None:
    text = '{"variable": {"A": {"default": ' + "1" * 5000 + "}}}"
    assert problems(text) == ["versions.json:1:32: a number of 5000 digits is too long"]


def test_a_circle_of_names() -> None:
    assert problems(source({"A": "${B}", "B": "${A}"})) == [
        'versions.json:4:18: "A" names ${B}, which leads back to it',
        'versions.json:7:18: "B" names ${A}, which leads back to it',
    ]
    three = problems(source({"X": "${A}", "A": "${B}", "B": "${C}", "C": "${A}"}))
    assert [text.split('"')[1] for text in three] == ["A", "B", "C"]


def test_brackets_without_end_in_a_bake_file(tmp_path: Path) -> None:
    root = tree(tmp_path, {"docker/deep.hcl": "# a\nx = " + "[\n" * 3000})
    (said,) = texts(drift(root))
    path, line, message = said.split(":", 2)
    assert (path, message) == ("docker/deep.hcl", " is nested too deeply")
    assert 100 < int(line) < 3000  # where it became too deep, which depends on what has called us


def test_an_audit_says_where_a_file_is_nested_too_deeply(tmp_path: Path) -> None:
    deep = "[\n" * 3000 + "]\n" * 3000
    files: dict[str, str | bytes] = {
        "bake.hcl": f'variable "X" {{\n default = {deep}}}\n',
        "pyproject.toml": f"# a\nx = {deep}",
        "docker-bake.json": '{"variable": ' + deep,
        "a.yaml": f"X_VERSION: 1\nb: {deep}",
    }
    said = texts(look(plant(tmp_path, files)).unreadable)
    assert said[1] == "bake.hcl:3001: is nested too deeply"
    assert said[3] == "pyproject.toml:3001: is nested too deeply"
    assert "nested too deeply (line" in said[2] and "nesting depth (line" in said[0]


def test_a_word_nested_too_deeply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = "${A:-" * 3000 + "x" + "}" * 3000
    path = plant(tmp_path, {"Dockerfile": f"FROM scratch\nARG A={word}\n"}) / "Dockerfile"
    assert main(["versions", "args", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith(f"{path}:2: ")
    assert main(["versions", "args", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)[0]["value"] is None


def test_a_dockerfile_in_utf16_is_one_finding(tmp_path: Path) -> None:
    root = tree(tmp_path, {"docker/Dockerfile.x": REACHED.encode("utf-16")})
    assert texts(drift(root)) == ["docker/Dockerfile.x: is UTF-16, which BuildKit does not read"]


def test_a_template_that_is_a_link_out_of_the_tree_or_includes_itself(tmp_path: Path) -> None:
    secret = plant(tmp_path, {"s": "secret\n"}) / "s"
    circle = '{% include "zz.j2" %}'
    files: dict[str, str | bytes] = {"templates/zz.j2": circle, "templates/in.j2": '{% include "leak.j2" %}'}
    root = tree(tmp_path, {**files, "templates/Dockerfile.j2": "ARG TORCH_VERSION={{ TORCH_VERSION }}\nFROM scratch\n"})
    (root / "templates" / "leak.j2").symlink_to(secret)
    found = drift(root)
    assert not any("secret" in finding.diff for finding in found)
    said = texts(found)
    assert "templates/leak.j2: is a link out of the tree; it is not read" in said
    assert "templates/zz.j2: cannot be rendered: it includes itself, or is nested too deeply" in said


def test_what_a_terminal_obeys_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {"docker/a\x1b[31m\nb.txt": "TORCH_VERSION=1.0\n"})
    assert main(["versions", "check", "--root", str(root)]) == 3
    out = capsys.readouterr().out
    assert "docker/a\\x1b[31m\\nb.txt:1: " in out
    assert "\x1b" not in out


def test_a_bump_to_no_version_blames_the_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path)
    (root / "versions.json").write_text(source({"TORCH_VERSION": "2.13.0"}, {"TORCH_VERSION": {"packages": ["torch"]}}))
    assert main(["versions", "bump", "--root", str(root), "--offline", "TORCH_VERSION=abc"]) == 2
    err = capsys.readouterr().err
    assert "is not a version (PEP 440)" in err
    assert "correct versions.json" not in err


@pytest.mark.parametrize(
    "text",
    [
        "ARG A0=1234567890123456789012345678\n"
        + "".join(f"ARG A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 60))
        + "FROM x\n",
        "FROM x\nENV A0=1\n" + "".join(f"ENV A{n}=${{A{n - 1}}}x$A{n - 1}\n" for n in range(1, 60)),
        "FROM x\nARG A0=1\n" + "".join(f"ARG A{n}=${{A{n - 1}}}xxxxxxxx\n" for n in range(1, 8000)),
        "FROM x\nARG A0=1\nARG A1=" + "$A0" * 20000 + "\nARG A2=" + "$A1" * 20000 + "\nARG A3=" + "$A2" * 20000 + "\n",
    ],
)
def test_values_that_grow_without_end_are_said_to_be_too_large(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"docker/big.Dockerfile": text})
    started = time.monotonic()
    said = texts(drift(root))
    assert said and all("expand" in line and "too large" in line and len(line) < 600 for line in said)
    assert time.monotonic() - started < 20
