"""The step `warm up`: let the producer make the caches, alone on its devices, and keep them in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pipeline import log

from . import store
from .producer import Place, WarmUp
from .request import Request
from .resolve import Inputs
from .session import Session
from .tuner import TuneProducer


def build(inputs: Inputs) -> str:
    """The step `build`: the image in which the warm-up runs. A server runs in the base, which will serve."""
    producer = inputs.producer
    return producer.build() if isinstance(producer, TuneProducer) else inputs.base.image_id


def warm_up(inputs: Inputs, image: str, request: Request, session: Session) -> WarmUp:
    """Warm up in `image` and keep what came of it, or take what another run of the same inputs kept meanwhile."""
    with store.making(session.home) as work, _alone_on_devices(inputs, request, session):
        found = None if request.retune else store.find(session.home, inputs.digest)
        if found is not None:
            log.note("another run warmed up the same inputs meanwhile")
            return found
        scratch = work / "scratch"
        scratch.mkdir()
        place = Place(
            client=session.client,
            engine=session.engine,
            image=image,
            gpus=inputs.gpus,
            log=session.log,
            scratch=scratch,
            timeout=request.tune_timeout,
            startup=request.startup_timeout,
        )
        made = inputs.producer.warm_up(place)
        store.check(made)
        return store.keep(session.home, inputs.digest, made, inputs.decides, work)


@contextlib.contextmanager
def _alone_on_devices(inputs: Inputs, request: Request, session: Session) -> Iterator[None]:
    """Be the only run that times these devices.

    Nothing is timed for caches that were tuned elsewhere, nor by a server on CPUs: neither waits for another run.
    """
    from pipeline.daemon import device_lock

    cuda = inputs.producer.device == "cuda"
    if request.caches or (request.server and not cuda):
        yield
        return
    devices = [gpu.uuid for gpu in inputs.gpus.gpus] if cuda else ["cpu"]
    machine = "" if session.engine.local else session.engine.name
    with device_lock(devices, machine=machine, wait=request.device_timeout):
        yield
