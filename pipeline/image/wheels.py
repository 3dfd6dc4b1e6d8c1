"""The wheelhouse: pip runs on the host, with the host's own indexes, proxies and certificates, for the image's Python.

Resolve first, download after: what pip would install is read from its report and refused while nothing has been
fetched that is not wanted. A wheelhouse is complete or absent: it is filled beside its place and renamed into it.
"""

from __future__ import annotations

import json
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

from .closures import Closure, listed, normal, refuse_unpinned
from .facts import BaseFacts


class WheelsUnavailable(BuildError):
    """pip could not resolve or fetch what is pinned."""


@dataclass(frozen=True)
class Wheelhouse:
    """A directory with every wheel, pip's own included, and `requirements.txt`; `digest` names its content."""

    path: Path
    digest: str
    reused: bool


def _pins(requirements: Path) -> dict[str, str]:
    """Name to version of a fully pinned requirements file (rendered by us, so one pin a line)."""
    from packaging.requirements import Requirement

    found = {}
    for raw in requirements.read_text(encoding="utf-8").splitlines():
        line = raw.partition("#")[0].strip()
        if line:
            requirement = Requirement(line)
            found[normal(requirement.name)] = next(iter(requirement.specifier)).version
    return found


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
        said = [line for line in error.details if line.startswith("ERROR")] or list(error.details)
        raise WheelsUnavailable(
            "pip could not resolve or fetch the pinned wheels",
            details=said[-8:],
            hint="pip ran with this host's own configuration: `pip config debug` shows it; behind a proxy or a private "
            "certificate authority set pip's `proxy` and `cert`",
            log=str(logfile),
        ) from error


def _resolvable(closure: Closure, pins: dict[str, str]) -> str:
    """The pins as pip shall resolve them."""
    without = closure.without or {}
    wanted = {name: version for name, version in pins.items() if name not in closure.alone}
    return "".join(f"{n}=={v}{',' + without[n] if n in without else ''}\n" for n, v in wanted.items())


def fill(closure: Closure, requirements: Path, facts: BaseFacts, home: Path, logfile: Path) -> Wheelhouse:
    """Return the wheelhouse of a closure's requirements file for a base, filling it when it is not there yet."""
    pins = _pins(requirements)
    kind = closure.name.removeprefix("image-")
    recipe = {"requirements": requirements.read_text(encoding="utf-8"), "target": _target(facts), kind: True}
    digest = sha256_json(recipe)
    place = home / "wheels" / digest[:32]
    if place.is_dir():
        return Wheelhouse(place, digest, reused=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch(place.parent, ".wheels-") as work:
        resolvable, exact = work / "resolve.txt", work / "exact.txt"
        resolvable.write_text(_resolvable(closure, pins), encoding="utf-8")
        report = work / "report.json"
        with log.step(f"resolve {len(pins)} wheels for Python {facts.python} on {facts.machine}"):
            _pip(
                ["install", "--quiet", "--dry-run", "--ignore-installed", "--target", str(work / "none"),
                 "--report", str(report), *_target(facts), "--requirement", str(resolvable)],
                logfile,
            )  # fmt: skip
            told = json.loads(report.read_text(encoding="utf-8"))
            if closure.refuse is not None:
                closure.refuse(told)
            refuse_unpinned(told, pins)
        found = {name: f"{name}==={version}" for name, version in listed(told).items()}
        chosen = [found.get(name, f"{name}=={version}") for name, version in pins.items()]
        exact.write_text("\n".join(chosen) + "\n", encoding="utf-8")
        wheels = work / "wheels"
        with log.step("fetch the wheels"):
            _pip(
                ["download", "--quiet", "--no-deps", "--dest", str(wheels), *_target(facts),
                 "--requirement", str(exact)],
                logfile,
            )  # fmt: skip
        shutil.copyfile(requirements, wheels / "requirements.txt")
        for path in wheels.iterdir():
            path.chmod(0o644)
        wheels.chmod(0o755)
        try:
            wheels.rename(place)
        except OSError:
            if not place.is_dir():  # another run was faster: its wheelhouse is the same
                raise
    return Wheelhouse(place, digest, reused=False)
