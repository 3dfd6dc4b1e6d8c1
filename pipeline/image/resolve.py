"""The step `resolve`: everything that decides what is baked, found once and put under one digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.cache.tree import Stored
from pipeline.contract.digest import sha256_bytes, sha256_file, sha256_json
from pipeline.contract.errors import CacheRefused, DriftError, UsageError
from pipeline.contract.files import write_whole
from pipeline.contract.places import CACHE_ROOT, CODE_ROOT
from pipeline.contract.plan import Plan
from pipeline.planning.ops import Target
from pipeline.versions import values

from . import base as bases
from .buildx import Recipe
from .contexts import FIXED_TIME, Destination, Staging, tuner_content
from .gpus import Gpus, check, check_driver, offered
from .names import KEY, check_free, own_labels, split
from .probe import BaseFacts, destinations, probe
from .producer import Producer
from .replay import Here
from .request import Request
from .servers import make, obtain_cpu_base
from .session import Session
from .tuner import TuneProducer
from .wheels import COMPILER, CPU, CUDA, ensure_wheelhouse

# For a base that has all but the caches.
_ADD_CACHES = b"ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS final\n"


@dataclass(frozen=True)
class Inputs:
    """All that decides what is baked. `digest`, the inputs digest, is the sha256 of `decides`."""

    producer: Producer
    base: bases.Base
    here: Here
    recipe: Recipe
    version: str  # of FlashInfer or of the server, for the image's name
    decides: Mapping[str, object]
    digest: str


@dataclass(frozen=True)
class _Ground:
    """What a request is built on: versions, the base with what is in it, the devices, where our code goes."""

    request: Request
    session: Session
    versions: Mapping[str, str]
    base: bases.Base
    facts: BaseFacts
    gpus: Gpus
    code: Destination

    @property
    def here(self) -> Here:
        return Here(self.gpus, self.facts.processor, self.facts.machine)


def resolve(request: Request, session: Session) -> Inputs:
    """Find or make the base, the plan and the wheels; check all that can be checked before anything is timed."""
    versions = values(request.root)
    _refuse_drift(request.root, session.home)
    if request.image:
        check_free(session.client, *split(request.image))
    offer = _offer(request, session)
    if request.server and not request.base_image:
        base = obtain_cpu_base(request, session, versions)
    else:
        base = bases.obtain(
            session, wanted=request.base_image, default=versions["BASE_IMAGE"], suite=versions["DEBIAN_SUITE"]
        )
    log.note(f"base: {base.reference} ({base.origin}{f', {base.digest[:19]}…' if base.digest else ''})")
    facts, gpus = probe(session, base, offer)
    code = destinations(session, base, [CODE_ROOT])[CODE_ROOT]
    ground = _Ground(request, session, versions, base, facts, gpus, code)
    return _for_server(ground) if request.server else _for_plan(ground)


def _for_plan(ground: _Ground) -> Inputs:
    """The inputs of a tuning, or of caches that were tuned elsewhere."""
    request, session, facts, base, gpus = ground.request, ground.session, ground.facts, ground.base, ground.gpus
    plan = _plan(request, facts, gpus)
    installed = facts.packages["flashinfer-python"] if facts.complete else ground.versions["FLASHINFER_VERSION"]
    if facts.complete:
        _check_versions(facts, ground.versions, request)
    _check_flashinfer(plan, request.caches, installed)
    baked = own_labels(base.config).get(KEY, "").split(",")
    twice = [str(one.key) for one in request.caches if str(one.key) in baked]
    if twice:
        raise UsageError(f"{base.reference} has {twice[0]} already", hint="`pipeline build … --retune` makes it again")
    _announce(plan)
    if plan.device == "cuda" and not request.caches:
        _check_gpus(gpus, plan.layout.world, facts.cuda if facts.complete else ground.versions["CUDA_VERSION"], request)
        _refuse_hidden(facts, [CACHE_ROOT, *([facts.flashinfer] if request.bake_jit and facts.complete else [])], base)
    recipe = _recipe(ground, plan.device)
    producer = TuneProducer(
        session=session,
        plan=plan,
        recipe=recipe,
        base=base.image_id,
        here=ground.here,
        options=request.tune_options,
        previous=request.previous,
        imported=request.caches,
        bake_jit=request.bake_jit,
        retune=request.retune,
        provenance={
            "plan": plan.digest,
            "base_image": base.reference,
            "base_image_digest": base.digest or base.image_id,
            "versions_json": sha256_file(request.root / "versions.json"),
            "code": tuner_content(),
            "wheels": recipe.wheels,
        },
    )
    return _inputs(ground, producer, recipe, f"fi{plan.flashinfer_version}")


def _for_server(ground: _Ground) -> Inputs:
    """The inputs of a server's own start: the base must be the image that will serve."""
    request, packages = ground.request, ground.facts.packages
    producer = make(request, ground.base, packages)
    if producer.device == "cuda" and not request.imported:
        _check_gpus(ground.gpus, producer.ranks, ground.facts.cuda, request)
    # None of our code goes in: the server finds its caches by static ENV.
    recipe = Recipe(_ADD_CACHES, {}, _common(ground))
    return _inputs(ground, producer, recipe, f"{request.server}{packages.get(request.server, '')}")


def _inputs(ground: _Ground, producer: Producer, recipe: Recipe, version: str) -> Inputs:
    here = ground.here
    device: Mapping[str, object] = ground.gpus.facts() if producer.device == "cuda" else dict(here.processor)
    decides = {
        "base": ground.base.image_id,
        "wheels": recipe.wheels,
        "dockerfile": sha256_bytes(recipe.dockerfile),
        "device": {} if ground.request.imported else device,  # what was tuned elsewhere does not depend on who bakes it
        "producer": producer.name,
        "inputs": producer.inputs(),
    }
    return Inputs(producer, ground.base, here, recipe, version, decides, sha256_json(decides))


def _offer(request: Request, session: Session) -> Gpus:
    if request.device == "cpu":
        return Gpus()
    offer = offered(session.engine, wanted=request.gpus)
    if request.device == "cuda" and offer.access == "none" and not request.imported:
        raise UsageError(
            f"DEVICE=cuda, and the Docker Engine at {session.engine.host} offers no GPU",
            hint="install NVIDIA's container toolkit there (`nvidia-ctk cdi generate`); or tune where there is a GPU "
            "and import with CACHE=; or DEVICE=cpu",
        )
    return offer


def _plan(request: Request, facts: BaseFacts, gpus: Gpus) -> Plan:
    """The plan: the one that was made first, unless the engine's GPU or the base's FlashInfer ask for another."""
    assert request.plan is not None and request.make_plan is not None, "only a server needs no plan"
    target = Target("cuda", gpus.gpus[0].arch) if gpus.gpus and request.device != "cpu" else None
    version = facts.packages["flashinfer-python"] if facts.complete else ""
    first = request.plan
    same = target is None or (target.device, target.arch) == (first.device, first.arch)
    if same and version in ("", first.flashinfer_version):
        return first
    return request.make_plan(target, version)


def _announce(plan: Plan) -> None:
    pairs = sum(len(op.buckets) for op in plan.ops)
    log.note(
        f"{plan.model}: {len(plan.ops)} ops, {pairs} op × bucket pairs, {plan.layout.world} ranks, "
        f"device {plan.device}, FlashInfer {plan.flashinfer_version}, plan {plan.digest[:12]}"
    )
    for left in plan.untuned:
        log.note(f"not tuned: {left.name}: {left.reason}")
    for remark in plan.notes:
        log.note(remark)


def _check_gpus(gpus: Gpus, ranks: int, cuda: str, request: Request) -> None:
    for line in check(gpus, ranks, require_idle=request.require_idle):
        log.warn(line)
    check_driver(gpus, cuda)


def _refuse_hidden(facts: BaseFacts, paths: Sequence[str], base: bases.Base) -> None:
    """Refuse a base where a mount of the GPU runtime hides what would be baked: nothing was timed yet."""
    for path in paths:
        mount = facts.hidden(path)
        if mount:
            raise UsageError(
                f"what is baked at {path} would be hidden: every container with a GPU has a mount at {mount}",
                details=[f"base image {base.reference}; the mount comes from the GPU runtime or its CDI specification"],
                hint="a base whose FlashInfer lies elsewhere; or BAKE_JIT=0 (--no-bake-jit) where only its compiled "
                "modules lie there; or a CDI specification without that mount",
            )


def _check_versions(facts: BaseFacts, versions: Mapping[str, str], request: Request) -> None:
    want = {"flashinfer-python": versions["FLASHINFER_VERSION"], "torch": versions["TORCH_VERSION"]}
    differ = [
        f"{name} {facts.packages[name]}, versions.json says {version}"
        for name, version in want.items()
        if facts.packages[name].partition("+")[0] != version
    ]
    if differ and not request.accept_base_versions:
        raise DriftError(
            f"{request.base_image} brings {'; '.join(differ)}",
            hint="--accept-base-versions (ACCEPT_BASE_VERSIONS=1) records the base's own versions and goes on",
        )
    for line in differ:
        log.note(f"base versions accepted: {line}")


def _check_flashinfer(plan: Plan, caches: Sequence[Stored], installed: str) -> None:
    """Refuse a plan, or caches, for another FlashInfer than will be in the image: ranks would, after all is built."""
    other = [one for one in caches if one.key.flashinfer_version.partition("+")[0] != installed.partition("+")[0]]
    if other:
        wrong = [f"{one.path} was tuned with FlashInfer {one.key.flashinfer_version}" for one in other]
        raise CacheRefused(
            f"{wrong[0]}, and the image has {installed}",
            details=wrong[1:],
            hint="FlashInfer ignores it there: tune with the image's own; or a BASE_IMAGE with that FlashInfer and "
            "ACCEPT_BASE_VERSIONS=1",
        )
    if not caches and plan.flashinfer_version.partition("+")[0] != installed.partition("+")[0]:
        raise UsageError(
            f"the plan is for FlashInfer {plan.flashinfer_version}, and the image has {installed}",
            hint="leave --flashinfer-version out; or a BASE_IMAGE with that FlashInfer and ACCEPT_BASE_VERSIONS=1",
        )


def _recipe(ground: _Ground, device: str) -> Recipe:
    """Which Dockerfile builds the image, and which wheels go in.

    none      the base is an image of this pipeline, to which only caches are added
    overlay   the base brings torch and FlashInfer: nothing is installed
    cpu       any base with Python: CPU wheels
    cuda      any base with Python: CUDA from wheels, and a C++ compiler beside it for the stage that tunes
    """
    request, session, base, facts = ground.request, ground.session, ground.base, ground.facts
    if request.caches and own_labels(base.config):  # all but the caches is there already
        return Recipe(_ADD_CACHES, {}, _common(ground))
    if facts.complete:
        text = (request.root / "docker" / "Dockerfile.overlay").read_bytes()
        return Recipe(text, {"code": Staging(session.home).code(ground.code)}, _common(ground))
    if not request.install:
        raise UsageError(
            f"{base.reference} has no torch and FlashInfer: nothing in it would use a cache",
            hint=f"`pipeline build MODEL --base-image {base.reference} --cache DIR` installs them too",
        )
    locks, common = request.root / "requirements", _common(ground)
    contexts = {"code": Staging(session.home).code(ground.code)}
    if device == "cpu":
        wheels = ensure_wheelhouse(session, locks / CPU, facts)
        text = (request.root / "docker" / "Dockerfile").read_bytes()
        return Recipe(text, {**contexts, "wheels": wheels.path}, common, wheels.digest)
    if request.base_image and not facts.compiler:
        raise UsageError(
            f"{request.base_image} has neither torch and FlashInfer nor a C++ compiler for FlashInfer's modules",
            hint="BASE_IMAGE=vllm/vllm-openai:<version>, or any image with both; or install g++ in yours; or leave "
            "BASE_IMAGE out",
        )
    versions = ground.versions
    compiler = bases.obtain_compiler(
        session, base, default=versions["COMPILER_IMAGE"], wanted=request.base_image, suite=versions["DEBIAN_SUITE"]
    )
    wheels, compiler_wheels = (ensure_wheelhouse(session, locks / name, facts) for name in (CUDA, COMPILER))
    return Recipe(
        (request.root / "docker" / "Dockerfile.cuda").read_bytes(),
        {**contexts, "wheels": wheels.path, "compiler": compiler_wheels.path},
        {**common, "COMPILER_IMAGE": from_name(session, compiler)},
        sha256_json([wheels.digest, compiler_wheels.digest, compiler.image_id]),
    )


def _common(ground: _Ground) -> dict[str, str]:
    return {"BASE_IMAGE": from_name(ground.session, ground.base), "SOURCE_DATE_EPOCH": str(FIXED_TIME)}


def from_name(session: Session, base: bases.Base) -> str:
    """What FROM names: the digest that a registry gave, so that a name which moves on meanwhile changes nothing.

    With the containerd store an image that no registry knows has a digest too, which BuildKit might ask one for: there
    only a base that was pulled a moment ago is named by its digest.
    """
    surely = base.origin == "pulled" or not session.engine.containerd_store
    return base.pinned if base.pinned and surely else base.reference


def _refuse_drift(root: Path, home: Path) -> None:
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
    from pipeline.versions import load
    from pipeline.versions.render import render

    rendered = render(root, load(root))
    differ = [
        path for path, data in rendered.items() if not (root / path).is_file() or (root / path).read_bytes() != data
    ]
    if differ:
        raise DriftError(
            f"{', '.join(differ)} differ from what versions.json and templates/ give",
            hint="`pipeline versions check` shows how; `pipeline versions sync` renders them again",
        )
    write_whole(seen, b"")


def device_of(inputs: Inputs) -> str:
    """What was warmed up on, for the image's name: the GPU without its vendor's name, or `cpu-<machine>`."""
    producer = inputs.producer
    if producer.made_on:
        return producer.made_on
    if producer.device == "cuda" and inputs.here.gpus.gpus:
        return inputs.here.gpus.gpus[0].name.removeprefix("NVIDIA ")
    return f"cpu-{inputs.here.machine}"
