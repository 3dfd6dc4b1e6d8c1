"""Arguments and exit codes of `pipeline`, nothing else."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from . import log
from .commands import COMMANDS
from .contract.errors import PipelineError, UsageError
from .contract.exits import MEANING, Exit


class _Parser(argparse.ArgumentParser):
    """argparse with our way of refusing: one line, a hint, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    codes = ", ".join(f"{code.value} {meaning}" for code, meaning in MEANING.items())
    parser = _Parser(
        prog="pipeline",
        description="Tune FlashInfer kernels once, at image build, and bake the verified cache into the last layer.",
        epilog=f"Exit codes: {codes}.",
        allow_abbrev=False,
    )
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (module, line) in COMMANDS.items():
        one = sub.add_parser(name, help=line, description=line, allow_abbrev=False)
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

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)  # a CI job is cancelled with SIGTERM: same clean way out
    try:
        _unknown(words)
        arguments = _parser(_chosen(words)).parse_args(words)
        module = importlib.import_module(f"pipeline.commands.{COMMANDS[arguments.command][0]}")
        code = int(module.execute(arguments))
        sys.stdout.flush()
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        log.note("interrupted")
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout has gone (`| head`): nothing is wrong, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.OK)
    return code


if __name__ == "__main__":
    sys.exit(main())
