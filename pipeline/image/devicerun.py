"""`RUN --device`: giving a build step the GPUs through BuildKit, and asking a builder whether it would.

Needs buildx 0.22 (`--allow device`), the Dockerfile frontend 1.27, a BuildKit that grants the entitlement, and CDI on
the engine. Nothing tells the frontend's version, so the builder is given a step to build.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.contract.errors import BuildError
from pipeline.daemon import buildx
from pipeline.run import ProcessFailed, run

_PLAIN = b"RUN --network=none --mount=type=bind,from=previous"
ALLOW = ("--allow", "device")  # buildx's words
_PATIENCE = 120.0  # seconds
_ERROR = re.compile(r"^(?:#\d+ )?ERROR: (.*)")
# A step that has a GPU sees the driver's device files; the name of the first differs under WSL.
_LOOK = "test -e /dev/nvidiactl -o -e /dev/dxg"


class NoTuningStep(BuildError):
    """The Dockerfile has no tuning step to give a device to."""


def with_devices(dockerfile: bytes, devices: Sequence[str]) -> bytes:
    """The Dockerfile whose tuning step asks for CDI devices; everything else stays as it is."""
    if dockerfile.count(_PLAIN) != 1:
        raise NoTuningStep(
            "the Dockerfile has no tuning step that can be given a device", hint="`pipeline versions sync`"
        )
    return dockerfile.replace(_PLAIN, b"RUN " + _flags(devices).encode() + _PLAIN.removeprefix(b"RUN"))


def _flags(devices: Sequence[str]) -> str:
    return " ".join(f"--device={name}" for name in devices)


def probe_dockerfile(base: str, devices: Sequence[str]) -> str:
    """A build of one step that succeeds only with a GPU in it; the attempt keeps an earlier answer away."""
    return f"FROM {base}\nRUN {_flags(devices)} --network=none : {secrets.token_hex(4)} && {_LOOK}\n"


def why_not(environment: Mapping[str, str], *, base: str, devices: Sequence[str], cdi: bool, logfile: Path) -> str:
    """Why this engine's builder gives a step no GPU; empty when it does."""
    if not cdi:
        return "the engine knows no CDI device"
    version = buildx.version()
    if version < buildx.DEVICE:
        have, need = (".".join(map(str, one)) for one in (version, buildx.DEVICE[:2]))
        return f"buildx is {have}; `--allow device` came with {need}"
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        file = Path(folder) / "Dockerfile"
        file.write_text(probe_dockerfile(base, devices), encoding="utf-8")
        command = ["docker", "buildx", "build", "--progress=plain", "--output=type=cacheonly", *ALLOW, folder]
        try:
            run(command, env=environment, log=logfile, timeout=_PATIENCE)
        except ProcessFailed as error:
            return reason(error.details)
    return ""


def reason(said: Sequence[str]) -> str:
    """The builder's refusal in our words."""
    errors = [match[1] for line in said if (match := _ERROR.match(line))]
    last = errors[-1] if errors else (said[-1] if said else "no reason was printed")
    if "unknown flag: device" in last:
        return "the engine's Dockerfile frontend does not know `RUN --device`, which 1.27 does"
    if "entitlement" in last or "not allowed" in last:
        return f"the builder does not grant devices: {last[:200]}"
    if "exit code: 1" in last:
        return "a step was given the device and saw no GPU"
    return last[:200]
