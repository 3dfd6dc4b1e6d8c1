"""`pipeline build`, end to end: resolve → build → warm up → bake → verify → tag."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.manifest import Manifest
from pipeline.contract.verdict import Verdict

from .bake import bake, beside_those_of_base, manifests_of
from .buildx import Built
from .clean import remove_old
from .names import own_labels, split, tag, usual_name
from .producer import WarmUp
from .request import Request
from .resolve import Inputs, device_of, resolve
from .session import Session, open_session
from .verify import verify
from .warm_up import build, find_entry, warm_up

_REMEDY = "no image was named; RETUNE=1 (--retune) makes the caches again"
_REMEDY_IMPORTED = (
    "no image was named; the caches were tuned elsewhere and do not fit here: tune, or bake caches "
    "that were tuned in an image of this base"
)


@dataclass
class Clock:
    """Seconds of the steps, in order."""

    steps: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name`, whether it succeeds or not."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.steps.append((name, round(time.monotonic() - began, 3)))


@dataclass(frozen=True)
class Finished:
    """A baked and verified image without a name, and what it was made from."""

    session: Session
    inputs: Inputs
    warm: WarmUp
    reused: bool  # the store had the warm-up
    built: Built
    verdict: Verdict

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests of FlashInfer's keys, in order; none where a server warmed up."""
        if self.inputs.producer.name != "tune":
            return ()
        files = manifests_of(self.warm).values()
        return tuple(Manifest.from_json(json.loads(file.read_text(encoding="utf-8"))) for file in files)


@dataclass(frozen=True)
class Outcome:
    """A named image, where the time went (seconds), and where it can be read about."""

    image: str
    finished: Finished
    attrs: Mapping[str, Any]  # of the engine's inspect
    steps: tuple[tuple[str, float], ...]
    docker_host: str
    log: str

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        done, manifests = self.finished, self.finished.manifests
        keys = done.verdict.key.split(",")
        return {
            "image": self.image,
            "identity": done.verdict.identity,
            "image_id": done.built.image_id,
            "inputs": done.inputs.digest,
            "producer": done.inputs.producer.name,
            "key": keys[0],
            "keys": keys,
            "caches": [{"kind": one.kind, "path": one.path, "bytes": one.bytes} for one in done.warm.caches],
            "environment": dict(done.warm.environment),
            "entries": sum(sum(manifest.entries_per_op().values()) for manifest in manifests),
            "ranks": done.inputs.producer.ranks,
            "warm_up_seconds": round(done.warm.seconds, 3),
            "reused": done.reused,
            "size_bytes": int(self.attrs.get("Size", 0)),
            "cache_diff_id": done.verdict.cache_diff_id,
            "verdict": done.verdict.to_json(),
            "steps": dict(self.steps),
            "docker_host": self.docker_host,
            "log": self.log,
        }


def build_image(request: Request) -> Outcome:
    """Build, warm up, bake, verify and name one image. Raise the failed step's error; no name is given then."""
    clock = Clock()
    with open_session("build") as session:
        with clock.measure("resolve"):
            inputs = resolve(request, session)
        done = finish(request, inputs, session, clock)
        name = give_name(done, request.image)
        remove_old(session)
        attrs = session.client.images.get(name).attrs
        return Outcome(name, done, attrs, tuple(clock.steps), session.engine.host, str(session.log))


def finish(request: Request, inputs: Inputs, session: Session, clock: Clock | None = None) -> Finished:
    """From inputs to a verified image without a name. Raise the failed step's error; no image is left then."""
    clock = clock or Clock()
    warm, reused = obtain(request, inputs, session, clock)
    warm = beside_those_of_base(warm, own_labels(inputs.base.config))
    with clock.measure("bake"):
        built = bake(inputs, warm, session)
    with clock.measure("verify"):
        hint = _REMEDY_IMPORTED if request.imported else _REMEDY
        verdict = verify(inputs, session.unnamed, session, timeout=request.startup_timeout, hint=hint)
    return Finished(session, inputs, warm, reused, built, verdict)


def obtain(request: Request, inputs: Inputs, session: Session, clock: Clock) -> tuple[WarmUp, bool]:
    """The warm-up of these inputs, and whether the store had it."""
    warm = None if request.retune else find_entry(session.home, inputs.digest)
    if warm is not None:
        return warm, True
    with clock.measure("build"):
        image = build(inputs)
    with clock.measure("warm up"):
        return warm_up(inputs, image, request, session), False


def give_name(done: Finished, wanted: str = "") -> str:
    """Name the image; without a full verify its tag ends in `-unverified`."""
    session, inputs, producer = done.session, done.inputs, done.inputs.producer
    usual = usual_name(producer.model, producer.ranks, device_of(inputs), inputs.version, inputs.digest)
    repository, name = split(wanted or usual)
    if done.verdict.level != "replay" and not name.endswith("-unverified"):
        name += "-unverified"
    return tag(session.client, session.unnamed, repository, name)


def warm_up_only(request: Request) -> tuple[Inputs, WarmUp, bool]:
    """Everything up to the warm-up in the host's store: what `pipeline tune` does. The last says that it was there."""
    with open_session("tune") as session:
        inputs = resolve(request, session)
        return inputs, *obtain(request, inputs, session, Clock())
