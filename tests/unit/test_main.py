"""What a person sees when the surroundings are hostile: one line, a code, never a traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import __version__
from pipeline.__main__ import main, parser_for
from pipeline.commands import commands
from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
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


@pytest.mark.parametrize("words", [("cache", "add", "", "."), ("verify", "")], ids=lambda words: words[0])
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


@pytest.mark.parametrize("command", [["build", "tiny"], ["tune", "tiny"]])
def test_a_cache_folder_that_is_a_file_is_one_line_with_the_variable(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = pipeline(*command, env={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert done.returncode == 2
    assert "XDG_CACHE_HOME" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_command_ends_with_130_and_one_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.plan.plan_from", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert main(["plan", "tiny"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert capsys.readouterr().err == "interrupted\n"


def every_action(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from every_action(one)
        else:
            yield action


@pytest.mark.parametrize("name", [name for name, _ in commands()], ids=" ".join)
def test_each_help_begins_with_examples_that_parse(name: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name, "--help"])
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith(f"usage: pipeline {' '.join(name)} [options]")
    assert said.index("examples:") < said.index("options:")
    command = dict(commands())[name]
    assert command.examples
    for example in command.examples:
        assert f"  pipeline {' '.join(name)} {example}".rstrip() in said.splitlines()
        words = [*name, *shlex.split(example.partition(" -- ")[0])]
        assert parser_for(words).parse_args(words).execute
    assert [action.dest for action in every_action(parser_for(name)) if "" in (action.choices or ())] == []


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["bild"], "there is no command 'bild'", "did you mean `pipeline build`?"),
        (["check"], "there is no command 'check'", "did you mean `pipeline versions check`?"),
        (["versions", "snyc"], "there is no command 'versions snyc'", "did you mean `pipeline versions sync`?"),
        (["cache", "zz"], "there is no command 'cache zz'", "commands: ls, "),
        ([""], "there is no command ''", "commands: build, "),
        (["build", "tiny", "--retun"], "unrecognized arguments: --retun", "did you mean --retune?"),
        (["build", "tiny", "--compar", "on"], "unrecognized arguments: --compar on", "did you mean --compare?"),
        (["--verbos", "plan", "tiny"], "unrecognized arguments: --verbos", "did you mean --verbose?"),
        (["plan", "tiny", "-v", "-q"], "argument -q/--quiet: not allowed with argument -v/--verbose", "see `pipeline"),
        (["build", "tiny", "--compare", ""], "argument --compare: invalid choice: ''", "see `pipeline build --help`"),
    ],
)
def test_a_slip_is_one_line_with_what_was_meant(
    words: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith(f"hint: {hint}")


@pytest.mark.parametrize("words", [[], ["versions"], ["-q"]])
def test_without_a_command_the_help_is_shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "commands:" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["version"] == {"path": "pipeline/__init__.py"}
    assert capsys.readouterr().out == f"pipeline {__version__}\n"


def test_a_shell_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for words, said in ((["cache", "m"], "merge"), (["build", "tiny", "--ret"], "--retune")):
        asked = (
            f"COMP_WORDS=(pipeline {' '.join(words)}); COMP_CWORD={len(words)}; _shtab_pipeline; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(
            ["bash", "-c", f". {tmp_path}/script; {asked}"], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [said]
    assert main(["--print-completion", "fish"]) == 2


def test_caches_need_python_alone_and_registries_requests(tmp_path: Path) -> None:
    """As on a GPU host where nothing was installed."""
    cases = ROOT / "tests" / "cases" / "caches"

    def bare(*words: object) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-S", "-m", "pipeline", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    a, b = cases / "h200_two_tunes_a.json", cases / "h200_two_tunes_b.json"
    for words, code in (
        (("explain", a), 0),
        (("cache", "diff", a, b), 3),
        (("cache", "inspect", a), 0),
        (("cache", "merge", a, "-o", tmp_path / "out"), 0),
        (("cache", "ls"), 0),
        (("cache", "rm", "--older-than", "9"), 0),
    ):
        assert bare(*words).returncode == code, words
    pull = ("cache", "pull", "oci://localhost:1/x", "-o", tmp_path / "pulled")
    done = bare(*pull)
    assert (done.returncode, "needs the Python package requests" in done.stderr) == (2, True)
    (tmp_path / "site").mkdir()
    for name in ("requests", "urllib3", "idna", "certifi", "charset_normalizer"):
        (tmp_path / "site" / name).symlink_to(Path(importlib.import_module(name).__file__ or "").parent)
    done = bare(*pull)
    assert done.returncode == 8 and "Connection refused" in done.stderr, done.stderr


def test_quiet_leaves_errors_and_verbose_says_where_they_arose(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert "wrote" in pipeline("plan", "tiny", "-o", str(out)).stderr
    assert pipeline("-q", "plan", "tiny", "-o", str(out)).stderr == ""
    wrong = ("plan", "no-such-model/at-all/here")
    assert pipeline(*wrong, "-q").stderr.startswith("error: ")
    assert "Traceback" not in pipeline(*wrong).stderr
    assert "Traceback" in pipeline(*wrong, "-v").stderr


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "tiny", "--output", ""],
        ["plan", "tiny", "-o", " "],
        ["verify", "tuned/tiny:1", "-o", ""],
        ["cache", "merge", "one.json", "-o", ""],
        ["cache", "export", "tuned/tiny:1", "-o", ""],
        ["versions", "sync", "--root", ""],
        ["versions", "check", "--versions", ""],
        ["versions", "bump", "--root", "", "TORCH_VERSION=1"],
        ["build", "tiny", "--previous", ""],
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
    parsers = [tuner_parser(), replay_parser(), *(parser_for(name) for name, _ in commands())]
    found = [action for parser in parsers for action in every_action(parser)]
    assert any(action.type is path for action in found)
    assert not [action.dest for action in found if action.type is Path]


@pytest.mark.parametrize(
    "words",
    [
        "release cells tiny --registry http://u:hunter2@h/t",
        "release cells tiny --registry u:hunter2@h:5000/t",
        "cache inspect oci://u:hunter2@localhost:1/x:y",
        "cache ls http://u:hunter2@h/x",
        "cache inspect u:hunter2@localhost:1/a:b",
        "attestation verify http://u:hunter2@h/t --key cosign.pub",
    ],
)
def test_a_password_in_an_address_is_not_repeated(words, capsys):
    assert main(words.split()) == 2
    said = "".join(capsys.readouterr())
    assert "hunter2" not in said and "hint: " in said


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("tcp://u:hunter2@h:1 (X): no tcp://u:hunt@er2@h", "tcp://h:1 (X): no tcp://h"),
        ("https://u:hun/ter2@h/x", "https://h/x"),
        ("https://u:hunter 2@h", "https://h"),
        ("https://token@h/x", "https://h/x"),
        ("u:hunter2@h:1/a", "h:1/a"),
        ("ssh://u:hunter2@h and ssh://me@h", "ssh://h and ssh://me@h"),
        *((text, text) for text in (
            "http://[::1]:80/a@b", "https://h:8443/a@v1", "https://h: said a@b", "git+https://h/a@v1#egg=x",
            "docker://python:slim@sha256:00", "python:slim@sha256:00", "localhost:5000/a@b", "pkg:pypi/a@1",
        )),
    ],
)  # fmt: skip
def test_errors_have_addresses_without_their_logins(text, left):
    error = UsageError(text, hint=text, details=[text])
    assert [error.message, str(error), error.hint, *error.details] == [left] * 4


@pytest.mark.parametrize(
    "words", ["cache ls", "clean", "explain a:b", "daemon status", "attestation verify localhost:1/a:b"]
)
def test_a_user_without_a_home_folder_is_told_what_to_set(words, monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME", "DOCKER_CONFIG", "DOCKER_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "has no home folder" in said and "hint: set HOME" in said


def test_a_password_of_a_pin_is_not_printed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("torch @ https://user:hunter2@example.com/torch-1-py3-none-any.whl\n")
    for more in ((), ("--json",)):
        assert main(["versions", "pins", str(tmp_path / "a.txt"), *more]) == 0
        said = "".join(capsys.readouterr())
        assert "hunter2" not in said and "https://example.com/" in said


@pytest.mark.parametrize("place", ["/etc/passwd", "oci://localhost/x:1", ""])
def test_a_report_takes_an_image(place, capsys):
    assert main(["report", place]) == 2
    assert "\nhint: " in capsys.readouterr().err


def test_what_somebody_typed_reaches_the_terminal_on_one_line_without_its_commands(capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["plan", "tiny", "--arch", "a\x1b[31m\n::warning::b"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and len(err.splitlines()) == 3 and "a\\x1b[31m\\n::warning::b is no GPU" in err
