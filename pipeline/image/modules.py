"""FlashInfer's compiled modules that a plan loads, made once per base, architecture and list of modules.

<cache home>/modules/<digest>/
    root/           laid over `/`: FlashInfer's AOT directory with <name>/<name>.so
    modules.json    name, size and sha256 of each
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError
from pipeline.contract.files import scratch, write_json
from pipeline.contract.places import ENV_WORKSPACE, PLAN_FILE, TUNER_ROOT
from pipeline.contract.plan import Plan

from .containers import ContainerSpec, created, follow, tuner_command
from .contexts import package_content
from .gpus import Gpus
from .session import Session

WORKSPACE = "/tmp/workspace"  # noqa: S108 - inside the image
_OUT = "/out"
_LIMIT = 4 << 30  # bytes; the largest module known has some hundred megabytes


@dataclass(frozen=True)
class Modules:
    """A folder to lay over `/`, and the names of the modules in it; none where the plan loads none."""

    root: Path
    names: tuple[str, ...]

    @property
    def directory(self) -> str:
        """The directory of the image in which all of them lie."""
        files = [p for p in self.root.rglob("*") if p.is_file()]
        return str(
            PurePosixPath("/") / Path(os.path.commonpath([p.parent.parent for p in files])).relative_to(self.root)
        )


def arch_list(arch: str) -> str:
    """FlashInfer's name of an architecture as `FLASHINFER_CUDA_ARCH_LIST` spells it: `90a` is `9.0a`."""
    match = re.fullmatch(r"(\d+)(\d)([a-z]?)", arch)
    return f"{match[1]}.{match[2]}{match[3]}" if match else ""


def digest(base: str, plan: Plan) -> str:
    """What the modules depend on: the base, the architecture, the ops and dtypes of the plan, and how we name them."""
    ops = sorted({(op.op, *op.backends, *sorted(op.dtypes.items())) for op in plan.ops}, key=repr)
    code = package_content(("tune",))
    naming = {name: sha for name, sha in code.items() if name.startswith(("tune/ops/", "tune/jit"))}
    return sha256_json([base, plan.arch, [list(map(str, op)) for op in ops], naming])


def find(home: Path, name: str) -> Modules | None:
    """Modules that were compiled before; None where there are none, or they are damaged."""
    place = home / "modules" / name
    try:
        value = json.loads((place / "modules.json").read_text(encoding="utf-8"))
        found = Modules(place / "root", tuple(sorted(str(one["name"]) for one in value["modules"])))
        os.utime(place)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def compile_modules(
    session: Session, image: Callable[[], str], plan: Plan, gpus: Gpus, name: str, *, timeout: float
) -> Modules:
    """Compile in a container of `image()` (runtime, tuner, plan.json), or find what was compiled before."""
    known = find(session.home, name)
    if known is not None:
        return known
    environment = {ENV_WORKSPACE: WORKSPACE, "FLASHINFER_CUDA_ARCH_LIST": arch_list(plan.arch)}
    words = tuner_command("pipeline.tune.jit", f"{TUNER_ROOT}/{PLAN_FILE}", _OUT)
    spec = ContainerSpec(user="0:0", environment=environment, gpus=gpus)
    place = session.home / "modules" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    built = image()
    with (
        log.step("compile the modules that the plan loads"),
        scratch(place.parent, ".compiling-") as temporary,
        created(session.client, built, words, spec) as container,
    ):
        status = follow(container, "compiling", timeout=timeout, on_line=lambda line: log.note(f"│ {line}"))
        if status != 0:
            said = container.logs(tail=20).decode(errors="replace").splitlines()
            why = next((line for line in said if line.startswith("error:")), f"exit code {status}")
            raise BuildError(
                f"the modules were not compiled: {why}",
                details=said,
                hint="the base needs nvcc and CUDA's headers; BAKE_JIT=0 (--no-bake-jit) leaves compiled modules out",
            )
        value = json.loads(container.logs(stdout=True, stderr=False).decode().strip().splitlines()[-1])
        work = temporary / "entry"
        chunks, _ = container.get_archive(_OUT)
        safe_extract(chunks, work / "root", strip=1, limit=_LIMIT)
        write_json(work / "modules.json", value)
        try:
            work.rename(place)
        except OSError:
            if find(session.home, name) is None:
                raise
    found = find(session.home, name)
    assert found is not None, "it was written a moment ago"
    return found
