"""Check that the ssh program reaches an engine, in bounded time.

The docker SDK runs `ssh HOST docker system dial-stdio` without a timeout and reports a failure as a broken pipe.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from pipeline.contract.errors import PipelineError
from pipeline.run import run

_CONNECT = 15  # s, for connection, banner and key exchange
_TIMEOUT = 45.0  # s, for all of it: logging in may be slow


def check(host: str, *, timeout: float = _TIMEOUT) -> None:
    """Connect to `ssh://[user@]host[:port]` once and hang up; raise OSError with what ssh, or docker there, says."""
    where = urlsplit(host)
    command = ["ssh", "-o", f"ConnectTimeout={_CONNECT}"]
    command += ["-l", where.username] if where.username else []
    command += ["-p", str(where.port)] if where.port else []
    # netloc keeps upper case, which `hostname` does not: names in ssh's configuration are case-sensitive.
    name = where.netloc.rpartition("@")[2].partition(":")[0]
    try:
        run([*command, "--", name, "docker system dial-stdio"], timeout=timeout)
    except PipelineError as error:
        said = [line.strip() for line in error.details if line.strip()]
        raise OSError(said[-1][:300] if said else error.message) from error
