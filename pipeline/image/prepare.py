"""Everything before tuning: engine, base, wheels, contexts. Each step finds its result when it is there already."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.digest import sha256_bytes, sha256_file, sha256_json
from pipeline.contract.files import write_json
from pipeline.home import cache_home
from pipeline.versions import load

from . import base as bases
from . import contexts, device, wheels
from .buildkit import Builder
from .facts import BaseFacts, read_facts
from .request import Request
from .wrap import Runs, read_runs, write_dockerfile

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.engine import Engine

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Prepared:
    """What the builds need. `digest` covers all that decides the tuner image and what tuning it would find."""

    client: DockerClient
    builder: Builder
    base: bases.Base
    device: dict[str, Any]
    contexts: dict[str, Path]
    arguments: dict[str, str]
    home: Path
    digest: str


def previous_digest(previous: Path | None) -> str:
    """sha256 over the files of an earlier cache root; empty when there is none."""
    if previous is None:
        return ""
    files = sorted(p for p in previous.rglob("*") if p.is_file())
    return sha256_json({str(p.relative_to(previous)): sha256_file(p) for p in files})


def _staged(home: Path, name: str, content: object, make: Callable[[Path], Path]) -> Path:
    """A staged context addressed by what it is made from; made beside its place and renamed into it."""
    place = home / "contexts" / f"{name}-{sha256_json([contexts.STAGING, content])[:24]}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".staging-") as temporary:
        made = make(Path(temporary) / "made")
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # another run staged the same
                raise
    return place


def _code_content(package: Path) -> dict[str, str]:
    names = [package / name for name in contexts.SHIPPED_MODULES]
    for room in contexts.SHIPPED_ROOMS:
        names += [p for p in (package / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(path.relative_to(package)): sha256_file(path) for path in sorted(names)}


def _base_facts(client: DockerClient, base: bases.Base, home: Path) -> BaseFacts:
    place = home / "base" / f"{base.image_id.replace(':', '-')}.json"
    if place.is_file():
        told = json.loads(place.read_text(encoding="utf-8"))
        return BaseFacts(told["image_id"], told["python"], told["machine"], tuple(told["glibc"]))
    facts = read_facts(client, base.reference)
    write_json(place, asdict(facts))
    return facts


def _dockerfile(template: Path, runs: Runs, home: Path) -> Path:
    content = sha256_json([sha256_file(template), runs.wrapped()])
    return write_dockerfile(template, runs, home / "contexts" / f"Dockerfile-{content[:24]}")


def prepare(request: Request, engine: Engine, client: DockerClient, logfile: Path) -> Prepared:
    """Find or make the base, the wheelhouse and the staged contexts."""
    from pipeline.engine.buildx import environment

    home = cache_home()
    versions = load(request.root)
    requirements = request.root / "requirements" / "image-cpu.txt"
    base = bases.obtain(
        client, wanted=request.base_image, default=versions["BASE_IMAGE"], suite=versions["DEBIAN_SUITE"],
        home=home, logfile=logfile,
    )  # fmt: skip
    log.note(f"base: {base.reference} ({base.origin})")
    dockerfile = _dockerfile(request.root / "docker" / "Dockerfile", read_runs(client, base.reference), home)
    house = wheels.fill(requirements, _base_facts(client, base, home), home, logfile)
    code = _code_content(PACKAGE)
    previous = previous_digest(request.previous)
    plan = request.plan
    staged = {
        "wheels": house.path,
        "code": _staged(home, "code", code, lambda p: contexts.stage_code(PACKAGE, p)),
        "plan": _staged(home, "plan", plan.to_json(), lambda p: contexts.stage_plan(plan, p)),
        "previous": _staged(home, "previous", previous, lambda p: contexts.stage_previous(request.previous, p)),
    }
    here = device.read_processor(client, base.reference, local=engine.host.startswith("unix://"))
    arguments = {"BASE_IMAGE": base.reference, "SOURCE_DATE_EPOCH": str(contexts.FIXED_TIME)}
    empty = _staged(home, "empty", "", lambda p: contexts.stage_previous(None, p))
    decides = {
        "base": base.image_id, "wheels": house.digest, "code": code, "plan": plan.to_json(), "previous": previous,
        "dockerfile": sha256_bytes(dockerfile.read_bytes()), "device": here, "timeout": request.timeout,
        "engine": engine.host,
    }  # fmt: skip
    return Prepared(
        client=client,
        builder=Builder(environment(engine), dockerfile, empty, logfile),
        base=base,
        device=here,
        contexts=staged,
        arguments=arguments,
        home=home,
        digest=sha256_json(decides),
    )
