"""What a person sees when the surroundings are hostile: one line, a code, never a traceback."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.__main__ import _parser, main
from pipeline.commands import COMMANDS
from pipeline.contract.commandline import path
from pipeline.tune.__main__ import main as tuner
from pipeline.tune.arguments import parser as tuner_parser
from pipeline.tune.replay import _parser as replay_parser
from pipeline.tune.replay import main as replay

ROOT = Path(__file__).resolve().parents[2]


def pipeline(
    *words: str, env: dict[str, str] | None = None, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *words], cwd=ROOT, env={**os.environ, **(env or {})}, check=False, text=True,
        stdout=subprocess.PIPE if stdout is None else stdout, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_an_encoding_that_knows_no_dash_is_no_traceback() -> None:
    done = pipeline("plan", "tiny", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_full_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = pipeline("plan", "tiny", stdout=full.fileno())
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_of_standard_error_that_leaves_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from pipeline import log; log.note('begun'); log.note('going on'); print(sys.stderr.fileno())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=write, text=True, check=False)
    os.close(write)
    assert done.returncode == 0
    assert int(done.stdout) > 2  # what is started from now on writes to nobody either


@pytest.mark.parametrize("words", [("retune", ""), ("graft", "", "."), ("verify", "")], ids=lambda words: words[0])
def test_an_image_that_is_not_named_is_refused(words: tuple[str, ...]) -> None:
    done = pipeline(*words)
    assert done.returncode == 2
    assert "error: no image was named\nhint: " in done.stderr


TUNED = """
import sys
from pipeline.tune import __main__ as tuner
tuner._tune = lambda _: {"path": "/out/key", "notes": ["noted"], "substitutions": []}
sys.exit(tuner.main([sys.argv[1], sys.argv[1]]))
"""


@pytest.mark.parametrize(("stream", "status"), [("stdout", 2), ("stderr", 0)])
@pytest.mark.parametrize("how", ["full", "closed"])
def test_what_the_tuner_cannot_say_ends_no_tuning(tmp_path: Path, stream: str, status: int, how: str) -> None:
    number = {"stdout": "1", "stderr": "2"}[stream]
    command = (
        f"exec {sys.executable} -c '{TUNED}' {tmp_path}/out {number}>" + {"full": "/dev/full", "closed": "&-"}[how]
    )
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if how == "closed" else status), done.stderr
    assert ("/out/key is in place" in done.stderr) == (stream == "stdout" and how == "full")
    assert ("noted" in done.stderr) == (stream == "stdout")
    assert "Traceback" not in done.stderr


def test_a_closed_standard_output_is_no_traceback() -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m pipeline plan tiny >&-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["image", "tiny"], ["tune", "tiny"]])
def test_a_cache_folder_that_is_a_file_is_one_line_with_the_variable(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = pipeline(*command, env={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert done.returncode == 2
    assert "XDG_CACHE_HOME" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_right_after_the_start_ends_with_130() -> None:
    for wait in (0.005, 0.02, 0.04):
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "plan", "DeepSeek-V3", "--tp", "8"], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(wait)
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        process.stderr.close()
        status = process.wait()
        # Before our first line runs, the interpreter itself answers: it dies by the signal, which a shell calls 130, or,
        # while it reads its own `site` and `runpy`, ends with 1 and its own words.
        own_words = "init_import_site" in said or "Could not import runpy module" in said
        assert status in (130, 0, -signal.SIGINT) or (status == 1 and own_words), said
        assert status != 130 or "Traceback" not in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_offers_no_empty_choice(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    def offered(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
        for action in parser._actions:
            for choice in action.choices or ():
                yield action.dest, choice
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    yield from offered(below)

    assert [dest for dest, choice in offered(_parser([command])) if not choice] == []
    if command == "image":
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "--strategy {synchronized,leader,independent,sharded}" in capsys.readouterr().out
        for wrong in ("", "none"):
            assert main([command, "tiny", "--judge", wrong]) == 2
            assert f"invalid choice: {wrong!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "tiny", "--out", ""],
        ["plan", "tiny", "--out", " "],
        ["verify", "tuned/tiny:1", "--out", ""],
        ["cache", "merge", "one.json", ""],
        ["cache", "export", "tuned/tiny:1", ""],
        ["sync", "--root", ""],
        ["bump", "--root", "", "TORCH_VERSION=1"],
        ["image", "tiny", "--previous", ""],
        ["audit", ""],
        ["pipeline.tune", "plan.json", ""],
        ["pipeline.tune", "plan.json", "out", "--state", ""],
        ["pipeline.tune.replay", "--out", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # theirs are not for this process
    mains = {"pipeline.tune": tuner, "pipeline.tune.replay": replay}
    begun = mains.get(words[0])
    assert (begun(words[1:]) if begun else main(words)) == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("error: argument ") and first.endswith(": an empty path (the current folder is `.`)")
    assert hint.startswith("hint: see `") and words[0] in hint
    assert not list(tmp_path.iterdir())


def test_no_argument_takes_a_path_that_may_be_empty() -> None:
    def arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    yield from arguments(one)
            else:
                yield action

    parsers = [tuner_parser(), replay_parser(), *(_parser([command]) for command in COMMANDS)]
    found = [action for parser in parsers for action in arguments(parser)]
    assert any(action.type is path for action in found)
    assert not [action.dest for action in found if action.type is Path]
