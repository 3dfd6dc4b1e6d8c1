"""The wheelhouse: pip runs on the host, with the host's own indexes, proxies and certificates, for the image's Python.

What it downloads is in a lock with its hash. A wheelhouse is complete or absent: it is filled beside its place and
renamed into it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError
from pipeline.contract.scratch import scratch
from pipeline.run import ProcessFailed, run
from pipeline.versions.requirements import read_text

from .facts import BaseFacts


class WheelsUnavailable(BuildError):
    """pip could not fetch what a lock pins."""


@dataclass(frozen=True)
class Wheelhouse:
    """A directory with every wheel, pip's own included, and `requirements.txt`; `digest` names its content."""

    path: Path
    digest: str
    reused: bool


def _target(facts: BaseFacts) -> list[str]:
    short = facts.python.replace(".", "")
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", facts.python]
    for abi in (f"cp{short}", "abi3", "none"):
        words += ["--abi", abi]
    for platform in facts.platforms():
        words += ["--platform", platform]
    return words


def _pip(words: Sequence[str], logfile: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    try:
        run(command, log=logfile)
    except ProcessFailed as error:
        first = next((at for at, line in enumerate(error.details) if line.startswith("ERROR")), 0)
        said = [
            line.strip() for line in error.details[first:] if line.strip()
        ]  # a wrong hash: which wheel stands below
        raise WheelsUnavailable(
            "pip could not fetch the locked wheels",
            details=said[-8:],
            hint="pip ran with this host's own configuration: `pip config debug` shows it. torch for CPUs (+cpu) is on "
            "PyTorch's own index: add that to pip's `extra-index-url`. Where your index has other wheels of the same "
            "versions, `pipeline versions bump --refresh` locks those",
            log=str(logfile),
        ) from error


def fill(name: str, requirements: Path, facts: BaseFacts, home: Path, logfile: Path) -> Wheelhouse:
    """Return the wheelhouse of an environment's lock for a base, filling it when it is not there yet.

    Its identity is the lock's hashes: a wheel that is another one stops the build, and pip names it.
    """
    lock = requirements / f"{name}.txt"
    pins = sorted((pin.name, pin.specifier, pin.hashes) for pin in read_text(lock.read_text(encoding="utf-8"), "").pins)
    digest = sha256_json({"pins": pins, "target": _target(facts)})
    place = home / "wheels" / digest[:32]
    if place.is_dir():
        return Wheelhouse(place, digest, reused=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch(place.parent, ".wheels-") as work:
        wheels = work / "wheels"
        with log.step(f"fetch {len(pins)} wheels for Python {facts.python} on {facts.machine}"):
            _pip(
                ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(wheels), *_target(facts),
                 "--requirement", str(lock)],
                logfile,
            )  # fmt: skip
        shutil.copyfile(lock, wheels / "requirements.txt")
        for path in wheels.iterdir():
            path.chmod(0o644)
        wheels.chmod(0o755)
        try:
            wheels.rename(place)
        except OSError:
            if not place.is_dir():  # another run was faster: its wheelhouse is the same
                raise
    return Wheelhouse(place, digest, reused=False)
