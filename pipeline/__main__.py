"""Arguments and exit codes of `pipeline`, nothing else."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the modules below are read: nothing has been started

import argparse
import contextlib
import errno
import importlib
import io
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from . import __version__, log, terminal
from .commands import COMMANDS, Command, Group, commands
from .contract.commandline import Parser
from .contract.errors import MEANING, Exit, PipelineError, UsageError
from .contract.text import closest, without_login


def parser_for(words: Sequence[str] | None) -> Parser:
    """The parser of `pipeline`. Only the command that `words` name has its arguments: no other module is imported.

    With None every command has them, for the completion scripts of shells.
    """
    codes = "".join(f"\n  {code.value:<5}{meaning}" for code, meaning in MEANING.items())
    top = Parser(
        prog="pipeline",
        description="Make an inference server's first start once, at image build, and bake the verified caches into "
        "the image's last layers.\n\nexamples:\n"
        "  pipeline plan ./model/ --tp 8 --arch b200            what can be baked for this model\n"
        "  pipeline build tiny                                  try it: no GPU, a few minutes\n"
        "  pipeline build ./model/ --server vllm --base-image IMAGE --server-args '--model /mnt/models'\n"
        "  pipeline explain IMAGE -- --model /mnt/models        would this deployment use the caches?\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"exit codes:{codes}",
    )
    top.add_argument("--version", action="version", version=f"pipeline {__version__}")
    top.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        metavar="SHELL",
        help="print bash's, zsh's or tcsh's completion script: eval \"$(pipeline --print-completion bash)\"",
    )
    _add_verbosity(top)
    _add_commands(top, COMMANDS, None if words is None else [word for word in words if not word.startswith("-")])
    return top


def _add_commands(parser: Parser, known: Mapping[str, Command | Group], named: Sequence[str] | None) -> None:
    parser.set_defaults(parser=parser)  # the innermost one: its help is shown where no command is named
    actions = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", title="commands", parser_class=Parser)
    for name, one in known.items():
        described = _sentence(one.help) if isinstance(one, Group) else _described(f"{parser.prog} {name}", one)
        inner = actions.add_parser(
            name, help=one.help, description=described, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        _add_verbosity(inner)
        if named is not None and named[:1] != [name]:
            continue
        if isinstance(one, Group):
            _add_commands(inner, one.commands, None if named is None else named[1:])
        else:
            _function(one, "configure")(inner)
            inner.set_defaults(parser=inner, execute=_function(one, "execute"))


def _add_verbosity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    for short, name, level, line in (
        ("-v", "--verbose", log.VERBOSE, "print more, and where an error was raised"),
        ("-q", "--quiet", log.QUIET, "print only warnings and errors on stderr"),
    ):
        group.add_argument(
            short, name, dest="verbosity", action="store_const", const=level, default=argparse.SUPPRESS, help=line
        )


def _described(name: str, command: Command) -> str:
    """One line, then the examples: `--help` begins with what can be copied."""
    return "\n".join(
        [_sentence(command.help), "", "examples:", *(f"  {name} {words}".rstrip() for words in command.examples)]
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _function(command: Command, what: str) -> Callable[..., int]:
    module, _, name = command.module.partition(":")
    found: Callable[..., int] = getattr(
        importlib.import_module(f"pipeline.commands.{module}"), f"{what}_{name}" if name else what
    )
    return found


def _refuse_unknown(words: Sequence[str]) -> None:
    """Raise `UsageError` for a command that does not exist, with the one that was meant."""
    known: Mapping[str, Command | Group] = COMMANDS
    path: list[str] = []
    for word in (word for word in words if not word.startswith("-")):
        one = known.get(word)
        if one is None:
            elsewhere = {name[-1]: name for name, _ in commands()}
            near = closest(word, [*known, *elsewhere])
            meant = (*path, near) if near in known else elsewhere.get(near, ())
            hint = f"did you mean `pipeline {' '.join(meant)}`?" if meant else f"commands: {', '.join(known)}"
            raise UsageError(f"there is no command {' '.join([*path, word])!r}", hint=hint)
        if isinstance(one, Command):
            return
        path, known = [*path, word], one.commands


def _run(words: Sequence[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    words, rest = words[:cut], words[cut + 1 :]
    if "--print-completion" not in words[:1]:
        _refuse_unknown(words)
    arguments, unknown = parser_for(words).parse_known_args(words)
    parser: Parser = arguments.parser
    if unknown or (rest and not hasattr(arguments, "rest")):
        parser.refuse(unknown or rest)
    arguments.rest = rest  # what stands behind `--`: words of another program
    log.set_level(getattr(arguments, "verbosity", log.NORMAL))
    log.set_display(terminal.display())
    if getattr(arguments, "print_completion", None):
        import shtab

        sys.stdout.write(shtab.complete(parser_for(None), arguments.print_completion))
        return int(Exit.OK)
    if not hasattr(arguments, "execute"):
        parser.print_help()
        return int(Exit.OK)
    return int(arguments.execute(arguments))


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit code; the only place that turns errors into codes."""

    def interrupted(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    _speak_any_encoding()
    for sign in (signal.SIGINT, signal.SIGTERM):  # a CI job is cancelled with SIGTERM: same clean way out
        signal.signal(sign, interrupted)
    try:
        code = _run(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except PipelineError as error:
        if log.is_verbose():
            log.line(without_login(traceback.format_exc().rstrip()))
        log.fail(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is cleaned up: a second Ctrl-C has nothing to end
        log.line("interrupted")
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout has gone (`| head`): nothing is wrong, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.OK)
    except ModuleNotFoundError as error:
        if (error.name or "pipeline").partition(".")[0] == "pipeline":
            raise
        log.fail(UsageError(f"this command needs the Python package {error.name}", hint=_PACKAGES))
        return int(Exit.USAGE)
    except OSError as error:
        # A missing file that has a name is our own mistake; without one it is the current folder, which was removed.
        removed = error.errno == errno.ENOENT and error.filename is None
        if error.errno not in _SURROUNDINGS and not removed and not isinstance(error, shutil.Error):
            raise
        if log.is_verbose():
            log.line(without_login(traceback.format_exc().rstrip()))
        log.fail(_unusable(error))
        return int(Exit.USAGE)
    return code


_PACKAGES = "`make .venv/ready` installs all of them; `cache` and `explain` on files need Python alone"

# What a disk, a mount or a permission may answer to any write.
_SURROUNDINGS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
    errno.EIO, errno.ENAMETOOLONG, errno.ELOOP, errno.EBUSY,
}  # fmt: skip


def _unusable(error: OSError) -> UsageError:
    from .home import cache_home

    hint = "check the path, permissions and free space"
    if isinstance(error, shutil.Error):  # of a tree: where from, where to and why, of each file that was not copied
        failed = error.args[0][0] if isinstance(error.args[0], list) else error.args
        return UsageError(re.sub(r"^\[Errno \d+\] ", "", str(failed[-1])), hint=hint)
    nameless = "the current folder" if error.errno == errno.ENOENT else "standard output or a file"
    where = error.filename if isinstance(error.filename, str) else nameless
    with contextlib.suppress(UsageError):  # there may be no home folder
        if f"{where}/".startswith(f"{cache_home()}/"):
            hint += "; XDG_CACHE_HOME moves the cache folder"
    return UsageError(f"{where}: {error.strerror}", hint=hint)


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
