"""`pipeline-run CMD…`: check the tuned cache, log one line, become CMD.

Run by an isolated interpreter (`python3 -IS`), so that PYTHON* variables, which are CMD's, do not change it. It never
starts a child: CMD keeps our process id, so that signals, exit code and the role of PID 1 are CMD's own.
"""

# Importing pathlib takes longer than all that this module does.
# ruff: noqa: PTH123
from __future__ import annotations

import os
import signal
import sys

from pipeline.contract.errors import Exit
from pipeline.contract.places import ENV_CACHE_DIR, ENV_FILE, ENV_REQUIRE, ENV_WORKSPACE
from pipeline.start.check import Found, check
from pipeline.start.workspace import workspace

_NOT_FOUND, _NOT_RUNNABLE = 127, 126  # what a shell answers


def say(text: str) -> None:
    """One line on stderr; stdout is CMD's, and a closed stderr is no reason to fail."""
    try:
        os.write(2, (text + "\n").encode(errors="backslashreplace"))
    except OSError:
        return


def command_environment() -> dict[str, str]:
    """Our environment without what the interpreter put there: in the C locale it sets LC_CTYPE for its children."""
    environment = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as stream:
            given = stream.read().split(b"\0")
    except OSError:
        return environment
    if not any(line.startswith(b"LC_CTYPE=") for line in given):
        environment.pop("LC_CTYPE", None)
    return environment


def prepare(environment: dict[str, str]) -> Found | None:
    """Check, print the line, and put into `environment` what CMD needs. None where the check itself failed."""
    environment.pop(ENV_FILE, None)
    try:
        found = check(environment)
        base, remark = workspace(environment)
    except Exception as error:  # noqa: BLE001 - an internal error must not keep a server from starting
        say(f"tuned cache: not used: the check failed: {error!r}")
        return None
    if base:
        environment[ENV_WORKSPACE] = base
    if found.chosen is not None:
        environment[ENV_CACHE_DIR] = found.root
        environment[ENV_FILE] = found.chosen.path
    say(found.line() + (f"; {remark}" if remark else ""))
    return found


def become(command: list[str], environment: dict[str, str]) -> int:
    """Replace this process by CMD; return only a code that says why that was not possible."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and exec would hand that on
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - becoming CMD is what this is for
    except FileNotFoundError:
        say(f"error: {command[0]}: not found")
        return _NOT_FOUND
    except (OSError, ValueError) as error:
        say(f"error: {command[0]} cannot be run: {getattr(error, 'strerror', None) or error}")
        return _NOT_RUNNABLE


def main(command: list[str]) -> int:
    """Prepare and become; return an exit code only where CMD did not start."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in these milliseconds ends us without a traceback
    if not command:
        say("error: no command was given")
        say("hint: pipeline-run CMD…, for example `pipeline-run python3 serve.py`")
        return int(Exit.USAGE)
    environment = command_environment()
    found = prepare(environment)
    if environment.get(ENV_REQUIRE, "") not in ("", "0") and (found is None or found.chosen is None):
        say(f"error: {ENV_REQUIRE} is set and no tuned cache fits: {found.why if found else 'the check failed'}")
        say("hint: run on the GPU the image was tuned for, bake a cache for this one, or unset the variable")
        return int(Exit.CACHE)
    return become(command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
