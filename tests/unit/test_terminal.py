"""What a person at a terminal, a CI and a pipe see of the steps of a command."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = textwrap.dedent(
    """
    import sys, time
    from pipeline import log, terminal
    log.set_display(terminal.display())
    with log.step("tune on 2 ranks"):
        log.note("a note")
        log.progress("tuning qkv", 0, 4)
        time.sleep(0.3)
        log.progress("tuning o", 1, 4)
        time.sleep(0.3)
        with log.step("an inner step"):
            time.sleep(0.2)
    print("data")
    try:
        with log.step("verify"):
            raise ValueError
    except ValueError:
        pass
    """
)


def plain(**environment: str) -> tuple[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("GITHUB_ACTIONS", "NO_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def at_a_terminal(**environment: str) -> tuple[str, str]:
    """stdout, and what the terminal on stderr was sent."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GITHUB_ACTIONS", "NO_COLOR")}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", CODE], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True,
        env={**kept, "TERM": "xterm", "COLUMNS": "100", **environment},
    ) as process:  # fmt: skip
        os.close(theirs)
        said = b""
        try:
            while data := os.read(ours, 65536):
                said += data
        except OSError:  # the other end was closed
            pass
        os.close(ours)
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 0, said.decode()
    return out, said.decode()


def test_a_pipe_gets_plain_lines() -> None:
    out, said = plain()
    assert out == "data\n" and "\x1b" not in said and "::" not in said
    assert [line.split(" 0.")[0] for line in said.splitlines()] == [
        "→ tune on 2 ranks", "  a note", "→ an inner step", "✓ an inner step", "✓ tune on 2 ranks", "→ verify", "✗ verify",
    ]  # fmt: skip


def test_github_folds_each_outermost_step() -> None:
    out, said = plain(GITHUB_ACTIONS="true")
    assert out == "data\n" and "\x1b" not in said
    assert [line.split(" 0.")[0] for line in said.splitlines()] == [
        "::group::tune on 2 ranks", "  a note", "→ an inner step", "✓ an inner step", "::endgroup::", "✓ tune on 2 ranks",
        "::group::verify", "::endgroup::", "✗ verify",
    ]  # fmt: skip


def test_a_terminal_gets_a_live_line_with_parts_and_time_left() -> None:
    out, said = at_a_terminal()
    assert out == "data\n"
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    assert "0:00:00 tune on 2 ranks · 1 of 4 done · about 1 s left · tuning o" in words
    assert "0:00:00 an inner step" in words and "a note" in words
    assert words.count("✓ tune on 2 ranks") == words.count("✗ verify") == 1 and "→" not in words


def test_no_color_is_honoured() -> None:
    painted = r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])m"
    assert re.search(painted, at_a_terminal()[1])
    assert not re.search(painted, at_a_terminal(NO_COLOR="1")[1])


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    assert "→ tune on 2 ranks" in at_a_terminal(TERM="dumb")[1]
