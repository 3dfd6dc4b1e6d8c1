"""Everything before tuning: base, GPUs, plan, wheels, contexts. Each step finds its result when it is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.digest import sha256_bytes, sha256_file, sha256_json
from pipeline.contract.errors import DriftError, UsageError
from pipeline.contract.files import write_whole
from pipeline.contract.plan import Plan
from pipeline.home import cache_home
from pipeline.planning.ops import Target
from pipeline.versions import Versions, load

from . import base as bases
from . import contexts, device
from .buildkit import Builder
from .caches import check_flashinfer, collect
from .engine import with_engine_version
from .facts import BaseFacts
from .flavour import flavour
from .gpus import Gpus, NoGpu, check, check_driver, offered
from .probes import Probes, probed
from .request import Request
from .staging import Staging, code_content, tree_digest
from .wrap import Runs, finished_dockerfile, read_runs

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine


class RenderedFilesDiffer(DriftError):
    """A committed file was edited by hand, or versions.json was and `pipeline versions sync` did not run."""


class OtherFlashInferPlanned(UsageError):
    """The plan names another FlashInfer than the base or versions.json."""


class GpusForCpu(UsageError):
    """GPUS= is set, and nothing runs on a GPU."""


class BaseVersionsDiffer(DriftError):
    """The base brings another FlashInfer or torch than versions.json names."""


@dataclass(frozen=True)
class Prepared:
    """What the builds need.

    `decides` is all that decides the tuner image and what tuning it would find; `digest` covers that and the engine.
    """

    client: DockerClient
    engine: Engine
    builder: Builder
    template: bytes
    runs: Runs
    base: bases.Base
    gpus: Gpus
    device: dict[str, Any]
    plan: Plan
    contexts: dict[str, Path]
    modules: tuple[str, ...]
    arguments: dict[str, str]
    staging: Staging
    home: Path
    decides: Mapping[str, Any]
    digest: str
    previous: str  # digest of the cache that the ranks start from, empty where there is none
    two_bases: bool  # the stage that tunes stands on another base than the finished image

    def final_builder(self, keys: int) -> Builder:
        """The builder whose Dockerfile ends with a layer for each key and with what the image runs."""
        text = finished_dockerfile(self.template, self.runs, keys=keys)
        return replace(self.builder, dockerfile=text)


def _announce(plan: Plan) -> None:
    if plan.engine is not None:
        log.note(
            f"{plan.model}: {plan.engine.name} {plan.engine.version} tunes in its own start, "
            f"{plan.layout.world} ranks, device {plan.device}, plan {plan.digest[:12]}"
        )
        return
    pairs = sum(len(op.buckets) for op in plan.ops)
    log.note(
        f"{plan.model}: {len(plan.ops)} ops, {pairs} op × bucket pairs, {plan.layout.world} ranks, "
        f"device {plan.device}, FlashInfer {plan.flashinfer_version}, plan {plan.digest[:12]}"
    )
    for left in plan.untuned:
        log.note(f"not tuned: {left.name}: {left.reason}")
    for remark in plan.notes:
        log.note(remark)


def _check_versions(facts: BaseFacts, versions: Versions, request: Request) -> None:
    want = {"flashinfer-python": versions["FLASHINFER_VERSION"], "torch": versions["TORCH_VERSION"]}
    differ = [
        f"{name} {facts.packages[name]}, versions.json says {version}"
        for name, version in want.items()
        if facts.packages[name].partition("+")[0] != version
    ]
    if differ and not request.accept_base_versions:
        raise BaseVersionsDiffer(
            f"{request.base_image} brings {'; '.join(differ)}",
            hint="--accept-base-versions (ACCEPT_BASE_VERSIONS=1) records the base's own versions and goes on",
        )
    for line in differ:
        log.note(f"base versions accepted: {line}")


def _check_flashinfer(plan: Plan, caches: Sequence[Path], facts: BaseFacts, versions: Versions) -> None:
    """Refuse a plan, or caches, for another FlashInfer than will be in the image: ranks would, after all is built."""
    installed = facts.packages["flashinfer-python"] if facts.complete else versions["FLASHINFER_VERSION"]
    if caches:
        check_flashinfer(
            collect(caches),
            installed,
            hint="leave CACHE out to tune again; or a BASE_IMAGE with that FlashInfer and ACCEPT_BASE_VERSIONS=1",
        )
    elif plan.flashinfer_version.partition("+")[0] != installed.partition("+")[0]:
        raise OtherFlashInferPlanned(
            f"the plan is for FlashInfer {plan.flashinfer_version}, and the image has {installed}",
            hint="leave --flashinfer-version out; or a BASE_IMAGE with that FlashInfer and ACCEPT_BASE_VERSIONS=1",
        )


def _offer(request: Request, engine: Engine) -> Gpus:
    if request.device == "cpu":
        if request.gpus:
            raise GpusForCpu(
                f"GPUS={request.gpus} chooses GPUs, and DEVICE=cpu uses none", hint="leave one of them out"
            )
        return Gpus()
    offer = offered(engine, wanted=request.gpus)
    if request.device == "cuda" and offer.access == "none" and not request.caches:
        raise NoGpu(
            f"DEVICE=cuda, and the engine at {engine.host} offers no GPU",
            hint="install NVIDIA's container toolkit there (`nvidia-ctk cdi generate`); or tune where there is a GPU "
            "and import with CACHE=; or DEVICE=cpu",
        )
    return offer


def _refuse_drift(root: Path, versions: Versions, home: Path) -> None:
    """Refuse to build from rendered files that are not what versions.json and the templates give.

    What was found equal is remembered by the files' content: rendering takes as long as a cached build.
    """
    files = [root / "versions.json"]
    for folder in ("templates", "docker", "requirements"):
        files += sorted(p for p in (root / folder).rglob("*") if p.is_file())
    content = sha256_json([[str(p.relative_to(root)), sha256_file(p)] for p in files])
    seen = home / "contexts" / f"in-sync-{content[:24]}"
    if seen.exists():
        return
    from pipeline.versions.render import render

    rendered = render(root, versions)
    differ = [
        path for path, data in rendered.items() if not (root / path).is_file() or (root / path).read_bytes() != data
    ]
    if differ:
        raise RenderedFilesDiffer(
            f"{', '.join(differ)} differ from what versions.json and templates/ give",
            hint="`pipeline versions check` shows how; `pipeline versions sync` renders them again",
        )
    write_whole(seen, b"")


def _target(request: Request, gpus: Gpus) -> Target | None:
    """The GPU to plan for, where there is one; None plans for the CPU, or for what was asked."""
    if gpus.gpus and request.device != "cpu":
        return Target("cuda", gpus.gpus[0].arch)
    return None


def prepare(
    request: Request, engine: Engine, client: DockerClient, logfile: Path, probes: Probes | None = None
) -> Prepared:
    """Find or make the base, the plan, the wheelhouse and the staged contexts.

    `probes` remembers what bases and GPUs said, for a caller that prepares many images in one run.
    """
    home = cache_home()
    versions = load(request.root)
    _refuse_drift(request.root, versions, home)
    offer, probes = _offer(request, engine), probes or Probes()
    base = probes.bases.get(request.base_image) or bases.obtain(
        client, wanted=request.base_image, default=versions["BASE_IMAGE"], suite=versions["DEBIAN_SUITE"],
        home=home, logfile=logfile,
    )  # fmt: skip
    probes.bases[request.base_image] = base
    if base.image_id not in probes.runs:
        probes.runs[base.image_id] = read_runs(client, base.reference)
    why = ", since no registry answered" if base.origin == "bootstrapped" else ""
    log.note(f"base: {base.reference} ({base.origin}{why})")
    facts, gpus = probed(client, base, offer, home, probes)
    if facts.complete:
        _check_versions(facts, versions, request)
    target = _target(request, gpus)
    plan = request.plan(target, facts.packages.get("flashinfer-python", "") if facts.complete else "")
    plan = with_engine_version(plan, facts, base.reference)
    _check_flashinfer(plan, request.caches, facts, versions)
    _announce(plan)
    if plan.device == "cuda" and not request.caches:
        for line in check(gpus, plan.layout.world, require_idle=request.require_idle):
            log.warn(line)
        check_driver(gpus, facts.cuda if facts.complete else versions["CUDA_VERSION"])
    staging, previous = Staging(home), tree_digest(request.previous)
    kind = flavour(
        client, base, facts, device=plan.device, wanted=request.base_image, versions=versions, root=request.root,
        home=home, logfile=logfile,
    )  # fmt: skip
    template = (request.root / "docker" / kind.dockerfile).read_bytes()
    staged = {
        "code": staging.code(),
        "modules": staging.empty(),
        "plan": staging.plan(plan),
        "previous": staging.previous(request.previous, previous),
        **kind.houses,
    }
    here = gpus.facts() if plan.device == "cuda" else device.read_processor(client, base.reference, local=engine.local)
    decides: dict[str, Any] = {
        "base": base.image_id, "wheels": kind.digest, "code": code_content(), "plan": plan.to_json(), "device": here,
        "previous": previous, "dockerfile": sha256_bytes(template),
        "options": request.tune_options,
    }  # fmt: skip
    from pipeline.daemon.buildx import environment

    return Prepared(
        client=client,
        engine=engine,
        builder=Builder(environment(engine), template, staging.folder, staging.empty(), logfile),
        template=template,
        runs=probes.runs[base.image_id],
        base=base,
        gpus=gpus,
        device=here,
        plan=plan,
        contexts=staged,
        modules=(),
        arguments={
            "BASE_IMAGE": base.reference,
            "SOURCE_DATE_EPOCH": str(contexts.FIXED_TIME),
            **kind.arguments,
        },
        previous=previous,
        two_bases=kind.two_bases,
        staging=staging,
        home=home,
        decides=decides,
        digest=sha256_json({**decides, "engine": engine.host}),
    )
