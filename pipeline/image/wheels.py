"""The wheelhouse: pip runs on the host, with the host's own indexes, proxies and certificates, for the image's Python.

Resolve first, download after: what pip would install is read from its report and refused while nothing has been
fetched that is not wanted. A wheelhouse is complete or absent: it is filled beside its place and renamed into it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError, UsageError
from pipeline.run import ProcessFailed, run

from .facts import BaseFacts

# FlashInfer requires its whole CUDA tool chain (cudnn-frontend, cutlass-dsl, cuda-tile …), of which the AutoTuner on a
# CPU imports nothing: it is taken without its dependencies, and the build's import proves that this is enough.
_WITHOUT_DEPENDENCIES = ("flashinfer-python",)
_NOT_CUDA = {"nvidia-ml-py"}  # bindings to the driver's library by ctypes, no library itself
_CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")


class TorchNotForCpu(UsageError):
    """pip would install a CUDA build of torch, or CUDA libraries, into the CPU image."""


class PinsIncomplete(UsageError):
    """pip would install something that requirements do not pin."""


class WheelsUnavailable(BuildError):
    """pip could not resolve or fetch what is pinned."""


@dataclass(frozen=True)
class Wheelhouse:
    """A directory with every wheel, pip's own included, and `requirements.txt`; `digest` names its content."""

    path: Path
    digest: str
    reused: bool


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pins(requirements: Path) -> dict[str, str]:
    """Name to version of a fully pinned requirements file (rendered by us, so one pin a line)."""
    from packaging.requirements import Requirement

    found = {}
    for raw in requirements.read_text(encoding="utf-8").splitlines():
        line = raw.partition("#")[0].strip()
        if line:
            requirement = Requirement(line)
            found[_normal(requirement.name)] = next(iter(requirement.specifier)).version
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


def refuse_cuda(report: dict[str, Any]) -> None:
    """Raise `TorchNotForCpu` when pip's installation report holds a CUDA torch or any CUDA library."""
    found = {_normal(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    torch = found.get("torch", "")
    extra = sorted(n for n in found if n.startswith(_CUDA_PREFIXES) and n not in _NOT_CUDA)
    if (torch and not torch.endswith("+cpu")) or extra:
        what = f"torch {torch}" if torch and not torch.endswith("+cpu") else ", ".join(extra[:3])
        raise TorchNotForCpu(
            f"pip would bring {what} into the CPU image"
            + (f" with {len(extra)} CUDA packages" if extra and torch else ""),
            hint="add PyTorch's index of CPU wheels to pip's own configuration (`pip config set global.extra-index-url "
            "URL`), or a find-links folder that holds the +cpu wheel",
        )


def _refuse_unpinned(report: dict[str, Any], pins: dict[str, str]) -> None:
    loose = []
    for item in report["install"]:
        name, version = _normal(item["metadata"]["name"]), item["metadata"]["version"]
        if pins.get(name) not in (version, version.partition("+")[0]):
            loose.append(f"{name}=={version}")
    if loose:
        raise PinsIncomplete(
            f"{len(loose)} packages are needed and not pinned: {', '.join(loose[:5])}",
            hint="add them to versions.json and the requirements template, then `pipeline sync`",
        )


def fill(requirements: Path, facts: BaseFacts, home: Path, logfile: Path) -> Wheelhouse:
    """Return the wheelhouse for a requirements file and a base, filling it when it is not there yet."""
    pins = _pins(requirements)
    recipe = {"requirements": requirements.read_text(encoding="utf-8"), "target": _target(facts), "cpu": True}
    digest = sha256_json(recipe)
    place = home / "wheels" / digest[:32]
    if place.is_dir():
        return Wheelhouse(place, digest, reused=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".filling-") as temporary:
        work = Path(temporary)
        resolvable = work / "resolve.txt"
        names = [f"{n}=={v}" for n, v in pins.items() if n not in _WITHOUT_DEPENDENCIES]
        resolvable.write_text("\n".join(names) + "\n", encoding="utf-8")
        report = work / "report.json"
        with log.step(f"resolve {len(pins)} wheels for Python {facts.python} on {facts.machine}"):
            _pip(
                ["install", "--quiet", "--dry-run", "--ignore-installed", "--target", str(work / "none"),
                 "--report", str(report), *_target(facts), "--requirement", str(resolvable)],
                logfile,
            )  # fmt: skip
            told = json.loads(report.read_text(encoding="utf-8"))
            refuse_cuda(told)
            _refuse_unpinned(told, pins)
        wheels = work / "wheels"
        with log.step("fetch the wheels"):
            _pip(
                ["download", "--quiet", "--no-deps", "--dest", str(wheels), *_target(facts),
                 "--requirement", str(requirements)],
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
