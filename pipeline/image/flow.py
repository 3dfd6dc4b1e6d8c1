"""`pipeline build`, end to end: prepare → tuner → tuned (or the store, or imported) → final → verify → tag."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.errors import PipelineError
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.verdict import Verdict
from pipeline.home import cache_home

from . import modules, store
from .bake import bake
from .buildkit import Built, Stage
from .caches import Baked, CachesRefused, collect
from .choose import choose, filler
from .complete import complete
from .gpus import Gpus
from .guard import connected
from .libraries import check_same
from .naming import default_name, gpu_of, key_of
from .outcome import Clock, Outcome, log_file
from .prepare import Prepared, prepare
from .present import is_present
from .provenance import provenance
from .request import Request
from .staging import code_content
from .tuning import tune
from .unfinished import Unfinished
from .verify import How, VerifyFailed, verify

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine


_REMEDY = "no image was named; RETUNE=1 (--retune) makes the cache again"
_REMEDY_IMPORTED = (
    "no image was named; what CACHE gave was tuned elsewhere and does not fit here: leave CACHE out to tune again, or "
    "give what was tuned in an image of this base"
)


@dataclass(frozen=True)
class Keys:
    """What will be baked, the seconds that tuning it took, and whether the store had it. `root`: where it was tuned."""

    keys: tuple[Baked, ...]
    seconds: float
    reused: bool
    root: Path | None = None


def _known_tuner(home: Path, digest: str) -> str:
    """The tuner image that this digest gave last time; empty when it never did."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((home / "tuners" / f"{digest}.json").read_text(encoding="utf-8"))["tuner"])
    return ""


def tuned_root(request: Request, prepared: Prepared, clock: Clock, logfile: Path, *, trust_memory: bool) -> Keys:
    """The tuned root for this request: from the store, or by tuning now."""
    tuner = _known_tuner(prepared.home, prepared.digest) if trust_memory and not request.retune else ""
    found = _stored(request, prepared, tuner) if tuner else None
    if found is not None:
        return found
    way = choose(request, prepared)
    with clock.measure("build tuner"), log.step("build the tuner image"):
        built = prepared.builder.build(Stage("tuner", contexts=prepared.contexts, arguments=prepared.arguments))
    inputs = _inputs(request, prepared, built.config_digest)
    write_json(prepared.home / "tuners" / f"{prepared.digest}.json", {"tuner": built.config_digest})
    found = None if request.retune else _stored(request, prepared, built.config_digest)
    if found is not None:
        return found
    world, engine = prepared.plan.layout.world, prepared.plan.engine
    how = "in lock-step" if engine is None else f"in {engine.name}'s own start"
    with clock.measure("tune"), log.step(f"tune on {world} rank{'s' if world > 1 else ''} {how}"):
        origin = provenance(request, prepared, built.config_digest)
        anew = request.retune or not request.resume
        unfinished = Unfinished(prepared.home / "unfinished" / inputs.digest, anew)
        fill = filler(way, request, prepared, built.image_id, unfinished)
        made = tune(fill, inputs, prepared.home, logfile, origin)
        unfinished.drop()
    return Keys(collect([made.root]), made.seconds, reused=False, root=made.root)


def _stored(request: Request, prepared: Prepared, tuner: str) -> Keys | None:
    """What the store holds for this tuner; an entry that was damaged counts as none, and that is said."""
    found = store.take(prepared.home, _inputs(request, prepared, tuner))
    if found is None:
        return None
    try:
        return Keys(collect([found.root]), found.seconds, reused=True, root=found.root)
    except CachesRefused as error:
        log.warn(f"the stored cache is damaged, tuning again: {error.details[0]}")
        return None


def _with_modules(request: Request, prepared: Prepared, clock: Clock) -> Prepared:
    """Compile what the plan loads, and put it into the context of the stage `jit`; a CPU loads nothing."""
    if prepared.plan.device != "cuda" or not request.bake_jit or prepared.plan.engine is not None:
        return prepared
    place = prepared.home / "modules" / modules.digest(prepared.base.image_id, prepared.plan, code_content())
    found = modules.take(place)
    if found is None:
        with clock.measure("jit"):
            bare = prepared.builder.build(Stage("tuner", contexts=prepared.contexts, arguments=prepared.arguments))
            found = modules.fill(
                prepared.client, bare.image_id, prepared.plan, prepared.gpus, place, max_wait=request.max_tune
            )
    if not found.names:
        return prepared
    log.note(f"compiled modules: {', '.join(found.names)}")
    contexts = {**prepared.contexts, "modules": prepared.staging.modules(found.root)}
    return replace(prepared, contexts=contexts, modules=found.names)


def _inputs(request: Request, prepared: Prepared, tuner: str) -> store.Inputs:
    return store.Inputs(
        plan=prepared.plan.digest,
        tuner=tuner,
        device=prepared.device,
        options={"tune": list(request.tune_options), "seed": prepared.plan.seed},
        previous=prepared.previous,
    )


def _keys(request: Request, prepared: Prepared, clock: Clock, logfile: Path, *, trust_memory: bool) -> Keys:
    if request.caches:
        with log.step("judge the imported caches"):
            return Keys(complete(collect(request.caches)), 0.0, reused=True)
    return tuned_root(request, prepared, clock, logfile, trust_memory=trust_memory)


def _verdict_file(home: Path, built: Built) -> Path:
    return home / "verdicts" / f"{built.config_digest.replace(':', '-')}.json"


def _recalled(home: Path, built: Built) -> Verdict | None:
    """The passing replay verdict that this very image got earlier."""
    with contextlib.suppress(OSError, ValueError, PipelineError):
        verdict = Verdict.from_json(json.loads(_verdict_file(home, built).read_text(encoding="utf-8")))
        if verdict.result == "pass" and verdict.level == "replay" and verdict.config_digest == built.config_digest:
            return verdict
    return None


def _judge(request: Request, prepared: Prepared, built: Built, clock: Clock) -> Verdict:
    verdict = _recalled(prepared.home, built)
    if verdict is not None:
        return verdict
    if prepared.two_bases and not request.caches:
        with clock.measure("libraries"):
            tuner = prepared.builder.build(Stage("tuner", contexts=prepared.contexts, arguments=prepared.arguments))
            check_same(prepared.client, tuner.image_id, built.image_id, prepared.gpus)
    with clock.measure("verify"):
        processor = prepared.device if prepared.plan.device == "cpu" else {}
        how = how_to_verify(prepared.engine, prepared.gpus, processor, request.max_wait)
        verdict = verify(prepared.client, built.image_id, how)
    write_json(_verdict_file(prepared.home, built), verdict.to_json())
    if verdict.result != "pass":
        raise VerifyFailed(verdict, _REMEDY_IMPORTED if request.caches else _REMEDY)
    return verdict


def how_to_verify(engine: Engine, gpus: Gpus, processor: Mapping[str, Any], max_wait: float) -> How:
    """Replay on `engine`: a key's device is present when it is this processor, or among these GPUs."""
    names = tuple(gpu.name for gpu in gpus.gpus)
    return How(
        level="replay",
        max_wait=max_wait,
        look=engine.look,
        present=lambda manifest: is_present(manifest, processor=processor, gpus=names),
        gpus=gpus,
    )


def fill_store(request: Request) -> Keys:
    """Everything up to the tuned cache in the host's store: what `pipeline tune` does."""
    from pipeline.daemon import ensure

    logfile = log_file(cache_home(), "tune")
    engine = ensure(store=request.store or None)
    with connected(engine) as client:
        prepared = _with_modules(request, prepare(request, engine, client, logfile), Clock())
        return tuned_root(request, prepared, Clock(), logfile, trust_memory=True)


@dataclass(frozen=True)
class Finished:
    """A baked and verified image without a name, and what it was made from."""

    prepared: Prepared
    keys: tuple[Baked, ...]
    built: Built
    verdict: Verdict
    tune_seconds: float
    reused: bool

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests of its keys, in order."""
        return tuple(one.manifest for one in self.keys)


def finish(request: Request, prepared: Prepared, clock: Clock, logfile: Path) -> Finished:
    """Tune (or take from the store, or import), bake, verify. Raise the failed step's error; no image is left then."""
    prepared = _with_modules(request, prepared, clock)
    baked = _keys(request, prepared, clock, logfile, trust_memory=True)
    built = _bake(prepared, baked.keys, clock)
    if baked.reused and not request.caches and _recalled(prepared.home, built) is None:
        # The image is not the one that was verified, so its tuner may not be the one that tuned: ask BuildKit.
        baked = _keys(request, prepared, clock, logfile, trust_memory=False)
        built = _bake(prepared, baked.keys, clock)
    try:
        verdict = _judge(request, prepared, built, clock)
    except BaseException:
        discard(prepared.client, built.image_id)
        raise
    return Finished(prepared, baked.keys, built, verdict, baked.seconds, baked.reused)


def give_name(done: Finished, wanted: str = "") -> str:
    """Name the image in the engine, by default after model, GPU and key; without a replay it ends in `-unverified`."""
    repository, tag = split(wanted or usual_name(done.manifests))
    if done.verdict.level != "replay":
        tag += "-unverified"
    done.prepared.client.images.get(done.built.image_id).tag(repository, tag)
    return f"{repository}:{tag}"


def build_image(request: Request) -> Outcome:
    """Build, tune, bake, verify and name one image. Raise the failed step's error; no name is given then."""
    from pipeline.daemon import ensure

    clock = Clock()
    logfile = log_file(cache_home(), "image")
    with clock.measure("engine"):
        engine = ensure(store=request.store or None)
    with connected(engine) as client:
        with clock.measure("prepare"):
            prepared = prepare(request, engine, client, logfile)
        done = finish(request, prepared, clock, logfile)
        name = give_name(done, request.image)
        image = client.images.get(name)
        return Outcome(
            image=name,
            config_digest=done.built.config_digest,
            image_id=done.built.image_id,
            manifests=done.manifests,
            verdict=done.verdict,
            tune_seconds=done.tune_seconds,
            reused=done.reused,
            size=int(image.attrs.get("Size", 0)),
            cache_diff_id=done.verdict.cache_diff_id,
            steps=tuple(clock.steps),
            docker_host=engine.host,
            log=str(logfile),
        )


def discard(client: DockerClient, image_id: str) -> None:
    """Remove an image that nobody named, quietly: it failed, or its making was interrupted."""
    from docker.errors import DockerException

    with contextlib.suppress(DockerException, OSError):
        if not client.images.get(image_id).tags:
            client.images.remove(image_id)


def _bake(prepared: Prepared, keys: Sequence[Baked], clock: Clock) -> Built:
    with clock.measure("bake"), log.step("bake the cache into the last layer"):
        return bake(prepared, keys)


def usual_name(manifests: tuple[Manifest, ...]) -> str:
    """The name of an image with these keys, where the user gave none."""
    plan = manifests[0].plan
    return default_name(plan.model, plan.layout.tp, gpu_of(manifests), plan.flashinfer_version, key_of(manifests))


def split(name: str) -> tuple[str, str]:
    """Repository and tag of an image name; `latest` where it has no tag."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")
