"""Whether the ssh program reaches an engine, in bounded time and in its own words.

The docker SDK starts `ssh HOST docker system dial-stdio` without a bound, and tells of a failure that a pipe broke.
"""

from __future__ import annotations

import math
from urllib.parse import urlsplit

from pipeline.run import ProcessFailed, ProcessTimedOut, ProgramMissing, run

_CONNECT = 15.0  # seconds for connection, banner and key exchange
_PATIENCE = 45.0  # seconds for all of it: logging in may be slow


def words(host: str, connect: float) -> list[str]:
    """The command that the SDK runs for `ssh://[user@]host[:port]`, with a bound of `connect` seconds on connecting."""
    user, _, where = urlsplit(host).netloc.rpartition("@")
    name, _, port = where.partition(":")
    command = ["ssh", "-o", f"ConnectTimeout={max(1, math.ceil(connect))}"]
    command += ["-l", user] if user else []
    command += ["-p", port] if port else []
    return [*command, "--", name, "docker system dial-stdio"]


def reach(host: str, *, connect: float = _CONNECT, patience: float = _PATIENCE) -> None:
    """Connect once and hang up; raise OSError with what ssh, or the docker command there, says."""
    try:
        run(words(host, connect), timeout=patience)
    except ProcessTimedOut as error:
        raise OSError(f"ssh did not finish within {patience:.0f} s") from error
    except ProcessFailed as error:
        said = [line.strip() for line in error.details if line.strip()]
        raise OSError(said[-1][:300] if said else error.message) from error
    except ProgramMissing as error:
        raise OSError(error.message) from error
