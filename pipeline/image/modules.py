"""The step `jit`: the compiled modules that the plans load, filled once per base, architecture and module list.

    <cache home>/modules/<digest>/
        root/           laid over `/`: FlashInfer's AOT directory with <name>/<name>.so
        modules.json    name, size and sha256 of each

They are a layer of their own below the cache, which a re-tune does not move.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError
from pipeline.contract.files import write_json
from pipeline.contract.places import PLAN_FILE, TUNING_ROOT
from pipeline.contract.plan import Plan

from .contain import Sandbox, created, finish
from .fill import WORKSPACE, progress
from .gpus import Gpus

if TYPE_CHECKING:
    from docker import DockerClient

_OUT = "/out"
_LIMIT = 4 << 30  # bytes; the largest module known has some hundred megabytes


class ModulesNotCompiled(BuildError):
    """A base without a compiler, or modules that do not compile."""


@dataclass(frozen=True)
class Modules:
    """A folder to lay over `/`, and the names of the modules in it; nothing where the plan loads none."""

    root: Path
    names: tuple[str, ...]


def arch_list(arch: str) -> str:
    """FlashInfer's name of an architecture as `FLASHINFER_CUDA_ARCH_LIST` spells it: `90a` is `9.0a`."""
    match = re.fullmatch(r"(\d+)(\d)([a-z]?)", arch)
    return f"{match[1]}.{match[2]}{match[3]}" if match else ""


def digest(base: str, plan: Plan, code: Mapping[str, str]) -> str:
    """What the modules depend on: the base, the architecture, the ops and dtypes of the plan, and how we name them."""
    ops = sorted({(op.op, *op.backends, *sorted(op.dtypes.items())) for op in plan.ops}, key=repr)
    naming = {name: sha for name, sha in code.items() if name.startswith(("tune/ops/", "tune/modules", "tune/jit"))}
    return sha256_json([base, plan.arch, [list(map(str, op)) for op in ops], naming])


def command() -> list[str]:
    """What compiles, in a container of an image with the runtime and plan.json."""
    return ["python3", "-m", "pipeline.tune.modules", f"{TUNING_ROOT}/{PLAN_FILE}", _OUT]


def sandbox(plan: Plan, gpus: Gpus) -> Sandbox:
    """How that container is shut in; where there is no GPU the plan names the architecture."""
    environment = {"FLASHINFER_WORKSPACE_BASE": WORKSPACE, "FLASHINFER_CUDA_ARCH_LIST": arch_list(plan.arch)}
    return Sandbox(user="0:0", environment=environment, gpus=gpus)


def fill(client: DockerClient, image: str, plan: Plan, gpus: Gpus, place: Path, *, max_wait: float) -> Modules:
    """Compile in a container of `image` (runtime and plan.json), or find what was compiled before."""
    known = take(place)
    if known is not None:
        return known
    place.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.step("compile the modules that the plan loads"),
        tempfile.TemporaryDirectory(dir=place.parent, prefix=".compiling-") as temporary,
        created(client, image, command(), sandbox(plan, gpus)) as container,
    ):
        status = finish(container, "compiling", max_wait=max_wait, on_line=progress)
        if status != 0:
            said = container.logs(tail=20).decode(errors="replace").splitlines()
            why = next((line for line in said if line.startswith("error:")), f"exit code {status}")
            raise ModulesNotCompiled(
                f"the modules were not compiled: {why}",
                details=said,
                hint="the base needs nvcc and CUDA's headers; BAKE_JIT=0 leaves compiled modules out",
            )
        told = json.loads(container.logs(stdout=True, stderr=False).decode().strip().splitlines()[-1])
        work = Path(temporary) / "entry"
        chunks, _ = container.get_archive(_OUT)
        safe_extract(chunks, work / "root", strip=1, limit=_LIMIT)
        write_json(work / "modules.json", told)
        work.rename(place)
    return Modules(place / "root", names(told["modules"]))


def take(place: Path) -> Modules | None:
    """Modules that were compiled before; None where there are none, or they are damaged."""
    try:
        told = json.loads((place / "modules.json").read_text(encoding="utf-8"))
        return Modules(place / "root", names(told["modules"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def names(modules: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """The names of modules as they were told."""
    return tuple(sorted(str(one["name"]) for one in modules))
