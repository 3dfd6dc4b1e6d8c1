"""`pipeline image`, end to end: prepare → tuner → tuned (or the store) → final → verify → tag."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.errors import PipelineError
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.verdict import Verdict
from pipeline.home import cache_home

from . import store
from .bake import bake, read_manifest
from .buildkit import Built, Stage
from .guard import connected
from .outcome import Clock, Outcome, log_file
from .prepare import Prepared, prepare, previous_digest
from .request import Request, default_name
from .tuning import StageTuning, tune
from .verify import VerifyFailed, verify

if TYPE_CHECKING:
    from pipeline.engine import Engine


def _known_tuner(home: Path, digest: str) -> str:
    """The tuner image that this digest gave last time; empty when it never did."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((home / "tuners" / f"{digest}.json").read_text(encoding="utf-8"))["tuner"])
    return ""


def _tuned(request: Request, prepared: Prepared, clock: Clock, logfile: Path, *, trust_memory: bool) -> store.Tuned:
    """The tuned root for this request: from the store, or by tuning now."""
    tuner = _known_tuner(prepared.home, prepared.digest) if trust_memory and not request.retune else ""
    found = store.take(prepared.home, _inputs(request, prepared, tuner)) if tuner else None
    if found is not None:
        return found
    with clock.measure("build tuner"), log.step("build the tuner image"):
        built = prepared.builder.build(Stage("tuner", contexts=prepared.contexts, arguments=prepared.arguments))
    inputs = _inputs(request, prepared, built.config_digest)
    write_json(prepared.home / "tuners" / f"{prepared.digest}.json", {"tuner": built.config_digest})
    found = None if request.retune else store.take(prepared.home, inputs)
    if found is not None:
        return found
    world = request.plan.layout.world
    how = StageTuning(prepared.builder, prepared.contexts, prepared.arguments, request.timeout)
    with clock.measure("tune"), log.step(f"tune on {world} rank{'s' if world > 1 else ''} in lock-step"):
        return tune(how, inputs, prepared.home, logfile)


def _inputs(request: Request, prepared: Prepared, tuner: str) -> store.Inputs:
    return store.Inputs(
        plan=request.plan.digest,
        tuner=tuner,
        device=prepared.device,
        options={"timeout": request.timeout, "seed": request.plan.seed},
        previous=previous_digest(request.previous),
    )


def _recalled(home: Path, built: Built) -> Verdict | None:
    """The passing replay verdict that this very image got earlier."""
    place = home / "verdicts" / f"{built.config_digest.replace(':', '-')}.json"
    with contextlib.suppress(OSError, ValueError, PipelineError):
        verdict = Verdict.from_json(json.loads(place.read_text(encoding="utf-8")))
        if verdict.result == "pass" and verdict.level == "replay" and verdict.config_digest == built.config_digest:
            return verdict
    return None


def _judge(engine: Engine, request: Request, prepared: Prepared, built: Built, clock: Clock) -> Verdict:
    verdict = _recalled(prepared.home, built)
    if verdict is not None:
        return verdict
    with clock.measure("verify"):
        verdict = verify(
            prepared.client,
            built.image_id,
            containerd_store=engine.containerd_store,
            level="replay",
            max_wait=request.max_wait,
        )
    write_json(prepared.home / "verdicts" / f"{built.config_digest.replace(':', '-')}.json", verdict.to_json())
    if verdict.result != "pass":
        raise VerifyFailed(verdict)
    return verdict


def fill_store(request: Request) -> store.Tuned:
    """Everything up to the tuned cache in the host's store: what `pipeline tune` does."""
    from pipeline.engine import ensure

    clock = Clock()
    logfile = log_file(cache_home(), "tune")
    engine = ensure(store=request.store)
    with connected(engine) as client:
        prepared = prepare(request, engine, client, logfile)
        return _tuned(request, prepared, clock, logfile, trust_memory=True)


def build_image(request: Request) -> Outcome:
    """Build, tune, bake, verify and name one image. Raise the failed step's error; no name is given then."""
    from pipeline.engine import ensure

    clock = Clock()
    logfile = log_file(cache_home(), "image")
    with clock.measure("engine"):
        engine = ensure(store=request.store)
    with connected(engine) as client:
        with clock.measure("prepare"):
            prepared = prepare(request, engine, client, logfile)
        tuned = _tuned(request, prepared, clock, logfile, trust_memory=True)
        built = _bake(prepared, tuned, clock)
        if tuned.reused and _recalled(prepared.home, built) is None:
            # The image is not the one that was verified, so its tuner may not be the one that tuned: ask BuildKit.
            tuned = _tuned(request, prepared, clock, logfile, trust_memory=False)
            built = _bake(prepared, tuned, clock)
        verdict = _judge(engine, request, prepared, built, clock)
        manifest = read_manifest(tuned.root)
        image = client.images.get(built.image_id)
        repository, tag = _split(request.image or _name(manifest))
        image.tag(repository, tag)
        return Outcome(
            image=f"{repository}:{tag}",
            config_digest=built.config_digest,
            image_id=built.image_id,
            key=manifest.key,
            manifest=manifest,
            verdict=verdict,
            tune_seconds=tuned.seconds,
            reused=tuned.reused,
            size=int(image.attrs.get("Size", 0)),
            cache_diff_id=verdict.cache_diff_id,
            steps=tuple(clock.steps),
            docker_host=engine.host,
            log=str(logfile),
        )


def _bake(prepared: Prepared, tuned: store.Tuned, clock: Clock) -> Built:
    with clock.measure("bake"), log.step("bake the cache into the last layer"):
        return bake(
            prepared.builder,
            prepared.contexts,
            prepared.arguments,
            root=tuned.root,
            base=prepared.base.reference,
            home=prepared.home,
        )


def _name(manifest: Manifest) -> str:
    gpus = manifest.record.host.gpus
    device = gpus[0].removeprefix("NVIDIA ") if gpus else manifest.record.arch
    hashed = manifest.key.rpartition("/")[2]
    return default_name(manifest.plan.model, manifest.plan.layout.tp, device, manifest.plan.flashinfer_version, hashed)


def _split(name: str) -> tuple[str, str]:
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")
