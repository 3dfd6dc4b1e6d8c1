"""The one module that starts processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pipeline.run import ProcessFailed, ProcessTimedOut, ProgramMissing, clean_environment, describe, run
from pipeline.tune.steps import process_state


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_stdout_is_captured_and_stderr_is_kept_apart() -> None:
    done = run(python("import sys; print('data'); print('talk', file=sys.stderr)"), capture=True)
    assert done.stdout == "data\n"
    assert done.tail == ("talk",)


def test_a_failure_shows_the_last_twenty_lines_and_the_log(tmp_path: Path) -> None:
    logfile = tmp_path / "deep" / "log"
    with pytest.raises(ProcessFailed) as caught:
        run(python("[print(i) for i in range(50)]; raise SystemExit(3)"), log=logfile)
    assert caught.value.status == 3
    assert caught.value.details == tuple(str(i) for i in range(30, 50))
    assert caught.value.log == str(logfile)
    assert len(logfile.read_text().splitlines()) == 51  # the command itself comes first


def test_a_program_that_is_missing_is_named_with_a_hint() -> None:
    with pytest.raises(ProgramMissing, match="no-such-program was not found"):
        run(["no-such-program"])


def test_a_bound_ends_the_whole_process_group(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    child = (
        f"sh -c 'echo $$ > {marker}; sleep 600; :' & sleep 600; :"  # shells, which have started well within the bound
    )
    began = time.monotonic()
    with pytest.raises(ProcessTimedOut, match="without finishing"):
        run(["sh", "-c", child], timeout=3.0)
    assert time.monotonic() - began < 120
    pid, deadline = int(marker.read_text()), time.monotonic() + 60
    while process_state(pid) not in ("", "Z"):
        assert time.monotonic() < deadline, f"process {pid} outlived its group"
        time.sleep(0.1)


@pytest.mark.parametrize("capture", [True, False])
def test_a_pipe_that_another_process_keeps_open_is_not_waited_for(tmp_path: Path, capture: bool) -> None:
    child = (
        "import subprocess, sys; print('said', flush=True);"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, file=open('pid', 'w'))"
    )
    began = time.monotonic()
    done = run(python(child), capture=capture, log=tmp_path / "log", cwd=tmp_path)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - began < 120
    assert (done.stdout if capture else done.tail) == ("said\n" if capture else ("said",))
    assert (tmp_path / "log").read_text().splitlines()[1:] == ([] if capture else ["said"])


def test_a_timeout_counts_for_a_process_that_prints_nothing_more() -> None:
    with pytest.raises(ProcessTimedOut):
        run(python("import os, time; os.close(1); os.close(2); time.sleep(600)"), timeout=1.0)


def test_lines_are_complete_however_they_arrive_and_end() -> None:
    lines: list[str] = []
    code = "import sys, time; [(sys.stdout.buffer.write(b), sys.stdout.flush(), time.sleep(0.1)) for b in %r]"
    run(python(code % [b"a", b"b\nc\r", b"d\r\n\xffe"]), on_line=lines.append)
    assert lines == ["ab", "c", "d", "\ufffde"]


def test_what_a_listener_raises_comes_out_when_all_is_read() -> None:
    def refuse(line: str) -> None:
        raise LookupError(line)

    with pytest.raises(LookupError, match=r"^first$"):
        run(python("print('first', flush=True); print('x' * 1_000_000); print('last')"), on_line=refuse, timeout=60)


def test_a_full_log_does_not_end_what_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(python("print('first', flush=True); print('x' * 1_000_000); print('last')"), log=Path("/dev/full"))
    assert done.tail[-1] == "last"
    assert "/dev/full cannot be written to: No space left on device" in capsys.readouterr().err


def test_an_interruption_ends_the_process_and_reads_what_it_says_at_its_end(tmp_path: Path) -> None:
    child = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit(print('last', flush=True) or 0))\n"
        "time.sleep(0.5); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    )
    with pytest.raises(KeyboardInterrupt):
        run(python(child), log=tmp_path / "log", cwd=tmp_path)
    assert (tmp_path / "log").read_text().endswith("\nlast\n")


def test_a_child_sees_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    monkeypatch.setenv("https_proxy", "kept")
    kept = clean_environment({"OWN": "1"})
    assert "GITHUB_TOKEN" not in kept
    assert "AWS_SECRET_ACCESS_KEY" not in kept
    assert kept["PIP_INDEX_URL"] == kept["https_proxy"] == "kept"
    assert kept["OWN"] == "1"
    assert kept["PATH"] == os.environ["PATH"]


def test_stdin_is_closed_unless_given(tmp_path: Path) -> None:
    assert run(python("import sys; print(repr(sys.stdin.read()))"), capture=True).stdout == "''\n"
    given = tmp_path / "in"
    given.write_text("words")
    assert run(python("import sys; print(sys.stdin.read())"), capture=True, stdin=given).stdout == "words\n"


def test_statuses_are_said_in_words() -> None:
    assert describe(-9) == "was ended by SIGKILL"
    assert describe(7) == "ended with exit code 7"
