"""The step `warm up`: let the producer make the caches, alone on its devices, and keep them in the host's store.

The store is addressed by the inputs digest, so that nothing is warmed up twice:

    <cache home>/warm-ups/<inputs digest>/       root/ and warmup.json, see `producer`
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.files import alone, scratch

from .contexts import settle
from .producer import ROOT_FOLDER, EntryInvalid, Job, WarmUp, read_entry, write_entry
from .request import Request
from .resolve import Inputs
from .session import Session

MAKING = ".entry-"  # what the folders are called in which an entry is made, or removed


def build(inputs: Inputs) -> str:
    """The step `build`: the id of the image in which the warm-up runs."""
    return inputs.producer.build() or inputs.base.image_id


def warm_up(inputs: Inputs, image: str, request: Request, session: Session) -> WarmUp:
    """Warm up in `image` and keep what came of it, or take what another run of the same inputs kept meanwhile."""
    with making(session.home) as work, _alone_on_devices(inputs, request, session):
        found = None if request.retune else find_entry(session.home, inputs.digest)
        if found is not None:
            log.note("another run warmed up the same inputs meanwhile")
            return found
        scratch = work / "scratch"
        scratch.mkdir()
        job = Job(
            client=session.client,
            engine=session.engine,
            image=image,
            gpus=inputs.here.gpus,
            log=session.log,
            scratch=scratch,
            timeout=request.tune_timeout,
            startup=request.startup_timeout,
        )
        made = inputs.producer.warm_up(job)
        if not made.caches:
            raise CacheRefused("the warm-up left no cache", hint="see the log", log=str(session.log))
        return keep(session.home, inputs.digest, made, inputs.decides, work)


@contextlib.contextmanager
def _alone_on_devices(inputs: Inputs, request: Request, session: Session) -> Iterator[None]:
    """Be the only run that times these devices.

    Caches that were tuned elsewhere are not timed, and the times of a server on CPUs decide nothing: neither waits for
    another run.
    """
    from pipeline.daemon import device_lock

    cuda = inputs.producer.device == "cuda"
    if request.imported or (request.server and not cuda):
        yield
        return
    devices = [gpu.uuid for gpu in inputs.here.gpus.gpus] if cuda else ["cpu"]
    machine = "" if session.engine.local else session.engine.name
    with device_lock(devices, machine=machine, wait=request.tune_timeout):
        yield


def folder(home: Path) -> Path:
    """Where entries lie."""
    return home / "warm-ups"


def find_entry(home: Path, digest: str) -> WarmUp | None:
    """What the store has for these inputs; a damaged entry counts as none, and a warning says so."""
    place = folder(home) / digest
    if not place.is_dir():
        return None
    try:
        found = read_entry(place)
    except EntryInvalid as error:
        log.warn(f"the stored warm-up is damaged and not used: {error.message}")
        return None
    with contextlib.suppress(OSError):
        place.touch()  # `pipeline clean` removes what was not used for long
    return found


@contextlib.contextmanager
def making(home: Path) -> Iterator[Path]:
    """A scratch folder on the store's own disk. Raises `UsageError` where the store cannot be written to."""
    with contextlib.ExitStack() as stack:
        with _writing(home):
            folder(home).mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(scratch(folder(home), MAKING))
        yield temporary  # what a producer raises is no matter of the store


@contextlib.contextmanager
def _writing(home: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, shutil.Error) as error:  # of a tree that was copied, a list of what failed
        last = str(error.args[0][-1][-1]).partition(": ")[0] if isinstance(error, shutil.Error) else error.strerror
        raise UsageError(
            f"the store {folder(home)} cannot be written to: {last}",
            hint="check free space and permissions; XDG_CACHE_HOME moves it, `pipeline clean` makes room",
        ) from error


def keep(home: Path, digest: str, made: WarmUp, inputs: Mapping[str, object], work: Path) -> WarmUp:
    """Move a finished warm-up into the store, whole. `work` is a folder of `making`, in which `made.root` lies.

    Another run may have kept the same meanwhile: the later one replaces it. Raises `UsageError` where the store cannot
    be written to.
    """
    entry, place = work / "entry", folder(home) / digest
    with _writing(home):
        entry.mkdir()
        shutil.move(made.root, entry / ROOT_FOLDER)
        kept = replace(made, root=entry / ROOT_FOLDER)
        for one in kept.caches:
            settle(kept.root / one.path.lstrip("/"), keep_times=one.keep_times, writable=one.writable)
        write_entry(entry, kept, inputs)
        read_entry(entry)
        with alone(folder(home), lambda: None):
            if place.exists():
                place.rename(work / "old")
            entry.rename(place)
            return read_entry(place)
