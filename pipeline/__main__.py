"""Arguments and exit codes of `pipeline`, nothing else."""

from __future__ import annotations

import gc
import os
import signal
import sys


def _leave(_signal: int, _frame: object) -> None:
    """Ctrl-C while the modules below are read: nothing has been started."""
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    gc.set_threshold(50_000)  # what follows are imports, which leave nothing to collect

import argparse
import errno
import importlib
import io

from . import log
from .commands import COMMANDS
from .contract.commandline import Parser
from .contract.errors import PipelineError, UsageError
from .contract.exits import MEANING, Exit


class _Formatter(argparse.HelpFormatter):
    """argparse's own, which is made for every argument and looks for the terminal's width by a slow import."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    """The width of the terminal, as `shutil.get_terminal_size` has it."""
    try:
        given = int(os.environ.get("COLUMNS", "0"))
        if given > 0 or sys.__stdout__ is None:
            return given or 80
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80
    except (ValueError, OSError):
        return 80


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """All commands, or the one that is called: the help of the others is text that nobody sees then."""
    chosen = _chosen(words)
    codes = ", ".join(f"{code.value} {meaning}" for code, meaning in MEANING.items())
    parser = Parser(
        prog="pipeline",
        description="Tune FlashInfer kernels once, at image build, and bake the verified cache into the last layer.",
        epilog=f"Exit codes: {codes}.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    # With `prog` argparse need not lay out a usage line for it.
    sub = parser.add_subparsers(prog="pipeline", dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name in [chosen] if chosen is not None and words[0] == chosen else COMMANDS:
        module, line = COMMANDS[name]
        one = sub.add_parser(name, help=line, description=line, allow_abbrev=False, formatter_class=_Formatter)
        if name == chosen:
            importlib.import_module(f"pipeline.commands.{module}").configure(one)
    return parser


def _chosen(words: list[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _unknown(words: list[str]) -> None:
    chosen = _chosen(words)
    if chosen is not None and chosen not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(chosen, COMMANDS, n=1)
        hint = f"did you mean `pipeline {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {chosen!r}", hint=hint)


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit code; the only place that turns errors into codes."""
    words = sys.argv[1:] if words is None else words

    def interrupted(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    _speak_any_encoding()
    for sign in (signal.SIGINT, signal.SIGTERM):  # a CI job is cancelled with SIGTERM: same clean way out
        signal.signal(sign, interrupted)
    try:
        _unknown(words)
        arguments = _parser(words).parse_args(words)
        module = importlib.import_module(f"pipeline.commands.{COMMANDS[arguments.command][0]}")
        code = int(module.execute(arguments))
        sys.stdout.flush()
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is cleaned up: a second Ctrl-C has nothing to end
        log.note("interrupted")
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout has gone (`| head`): nothing is wrong, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.OK)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        log.fail(_unusable(error))
        return int(Exit.USAGE)
    return code


# What a disk, a mount or a permission may answer to any write of ours.
_NOT_OURS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.EISDIR,
    errno.EIO, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST,
}  # fmt: skip


def _unusable(error: OSError) -> UsageError:
    from .home import cache_home

    where = error.filename if isinstance(error.filename, str) else "a file or standard output"
    return UsageError(
        f"{where}: {error.strerror}",
        hint=f"check free space and permissions; what is kept lies in {cache_home()}, and XDG_CACHE_HOME moves it",
    )


def _speak_any_encoding() -> None:
    """Print whatever the terminal's encoding can, and the rest escaped; a closed stdout swallows."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for the process's whole life
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - likewise
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    ended = main()
    if ended == Exit.INTERRUPTED:  # without the interpreter's own last words on an interrupt
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(ended)
    sys.exit(ended)
