"""Ports for processes that open them seconds later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.tune import ports


def given_out(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text)
    monkeypatch.setattr(ports, "_RANGE", path)


def test_a_port_is_free_and_none_that_the_kernel_gives_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_out(tmp_path / "range", "10200\t60999\n", monkeypatch)
    for _ in range(50):
        assert 10_000 <= ports.free_port() < 10_200


def test_a_port_that_is_taken_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = iter(range(100))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_FROM", number)
        monkeypatch.setattr(ports, "_TO", number + 200)
        monkeypatch.setattr(ports, "_first_given_out", lambda: number + 200)
        monkeypatch.setattr(ports.secrets, "randbelow", lambda _: next(tried))
        assert number < ports.free_port() < number + 100


@pytest.mark.parametrize("text", ["1024\t65535\n", "10050\t60999\n"])
def test_where_the_kernel_gives_out_nearly_all_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    given_out(tmp_path / "range", text, monkeypatch)
    monkeypatch.setattr(ports, "_bound", lambda port: port or 40_000)
    assert ports.free_port() == 40_000


@pytest.mark.parametrize("text", ["", "none\n"])
def test_a_kernel_that_does_not_say_has_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    given_out(tmp_path / "range", text, monkeypatch)
    assert 10_000 <= ports.free_port() < 30_000
