"""The wheelhouse: pip runs on the host, with the host's own indexes, proxies and certificates, for the image's Python.

What is fetched is what a hashed lock of requirements/ names, and nothing is resolved: the same lock gives the same
files, from whichever index.

    <cache home>/wheels/<digest of the lock's hashes and the platform>/
        *.whl, requirements.txt     the lock; pip's own wheel is among them
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError
from pipeline.contract.files import scratch
from pipeline.run import ProcessFailed, run
from pipeline.versions.requirements import read_text

from .probe import BaseFacts
from .session import Session

CPU, CUDA, COMPILER = "image-cpu.txt", "image-cuda.txt", "compiler-cuda.txt"


@dataclass(frozen=True)
class Wheelhouse:
    """A folder of wheels with the lock that they come from; `digest` covers the hashes of every wheel."""

    path: Path
    digest: str


def ensure_wheelhouse(session: Session, lock: Path, facts: BaseFacts) -> Wheelhouse:
    """The wheelhouse of a lock for a base, fetched where it is not there yet: complete, or absent."""
    pins = sorted((pin.name, pin.specifier, pin.hashes) for pin in read_text(lock.read_text(encoding="utf-8"), "").pins)
    digest = sha256_json({"pins": pins, "target": _target(facts)})
    place = session.home / "wheels" / digest[:32]
    if not place.is_dir():
        _fetch(session, lock, len(pins), facts, place)
    os.utime(place)
    return Wheelhouse(place, digest)


def _fetch(session: Session, lock: Path, count: int, facts: BaseFacts, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch(place.parent, ".wheels-") as work:
        wheels = work / "wheels"
        with log.step(f"fetch {count} wheels of {lock.name} for Python {facts.python} on {facts.machine}"):
            words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
            words += ["--no-deps", "--require-hashes", "--dest", str(wheels), *_target(facts)]
            try:
                run([*words, "--requirement", str(lock)], log=session.log)
            except ProcessFailed as error:
                raise _failed(lock, error, str(session.log)) from error
        shutil.copyfile(lock, wheels / "requirements.txt")
        for path in wheels.iterdir():
            path.chmod(0o644)
        wheels.chmod(0o755)
        try:
            wheels.rename(place)
        except OSError:
            if not place.is_dir():  # another run was faster: its wheelhouse is the same
                raise


def _target(facts: BaseFacts) -> list[str]:
    short = facts.python.replace(".", "")
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", facts.python]
    for abi in (f"cp{short}", "abi3", "none"):
        words += ["--abi", abi]
    for platform in facts.platforms():
        words += ["--platform", platform]
    return words


def _failed(lock: Path, error: ProcessFailed, log_path: str) -> BuildError:
    """pip's failure by its cause: a full disk, another file than the lock names, no such wheel, the network."""
    first = next((at for at, line in enumerate(error.details) if line.startswith("ERROR")), 0)
    said = [line.strip() for line in error.details[first:] if line.strip()]  # of a wrong hash: which wheel stands below
    whole = "\n".join(error.details)
    message, hint = (
        f"pip could not fetch the wheels of {lock.name}",
        "pip ran with this host's own configuration (`pip config debug` shows it); behind a proxy or a private "
        "certificate authority set pip's `proxy` and `cert`",
    )
    if "No space left on device" in whole or "Errno 28" in whole:
        message = "no space left for the wheels"
        hint = "free space where the cache home or TMPDIR lies; `pipeline clean` removes what is not needed"
    elif "DO NOT MATCH THE HASHES" in whole:
        message = f"an index has another wheel than {lock.name} names by its hash"
        hint = "where that is right, `pipeline versions bump --refresh` locks what your index has"
    elif missing := re.search(r"(?:distribution found for|the requirement|Cannot install) (\S+)", whole):
        # "Cannot install": pip speaks of conflicts where an index has other builds of the same version
        message = f"an index of this host lacks a wheel of {lock.name}: {missing[1]}"
        hint = (
            "add an index that has it to pip's own configuration (`pip config set global.extra-index-url URL`; torch "
            "for CPUs lies on an index of PyTorch's), or a find-links folder"
        )
    return BuildError(message, details=said[-8:], hint=hint, log=log_path)
