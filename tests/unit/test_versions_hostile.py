"""Trees that mean harm, or are merely broken: one clear line each, no traceback, no waiting for ever."""

from __future__ import annotations

import json
import os
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
    assert main(["args", str(tmp_path / "p.txt")]) == 2
    assert main(["pins", str(tmp_path / "p.txt")]) == 2
    assert capsys.readouterr().err.count("p.txt: is no ordinary file") == 2


@pytest.mark.parametrize("coding", ["idna", "punycode", "hex"])
def test_a_codec_that_refuses_to_replace(tmp_path: Path, coding: str) -> None:
    root = tree(tmp_path, {"requirements/a.txt": b"# coding: " + coding.encode() + b"\nsix==1.0\xff\n"})
    assert any("is not text in UTF-8" in text for text in texts(drift(root)))


def test_args_of_utf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plant(tmp_path, {"Dockerfile": REACHED.encode("utf-16")}) / "Dockerfile"
    assert main(["args", str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: is UTF-16, which BuildKit does not read\n"


def test_a_source_that_is_a_link_out_of_the_tree(tmp_path: Path) -> None:
    outside = plant(tmp_path / "outside", {"v.json": source({"TORCH_VERSION": "2.13.0"})}) / "v.json"
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "versions.json").symlink_to(outside)
    with pytest.raises(SourceInvalid, match="is a link out of the tree"):
        load(tmp_path / "inside")
