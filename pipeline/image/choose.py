"""Choosing where the ranks run, by asking the engine; the choice and its reason are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline import log
from pipeline.contract.errors import UsageError

from .devicerun import why_not
from .fill import SHM, ClassicFiller, ContainerFiller, Filler, StageFiller
from .prepare import Prepared
from .request import Request
from .unfinished import Unfinished

Form = Literal["stage", "device stage", "classic stage", "container"]


class StageWithoutGpu(UsageError):
    """TUNE_IN=stage on GPUs, and no builder of this engine can give a RUN step a GPU."""


@dataclass(frozen=True)
class Way:
    """Where the ranks run, and why."""

    form: Form
    reason: str


def choose(request: Request, prepared: Prepared) -> Way:
    """Choose a way and print it; raise `StageWithoutGpu` where the asked one cannot work."""
    way = _choose(request, prepared)
    log.note(f"tune in: {way.form} ({way.reason})")
    return way


def _choose(request: Request, prepared: Prepared) -> Way:
    asked = request.tune_in
    if asked == "container":
        return Way("container", "asked for")
    if prepared.plan.device == "cpu":
        return Way("stage", "no GPU is needed")
    gpus = prepared.gpus
    if gpus.access == "default-runtime":
        return Way("classic stage", "the engine's default runtime is nvidia, which the classic builder honours")
    lacks = why_not(
        prepared.builder.environment,
        base=prepared.base.reference,
        devices=gpus.devices,
        cdi=gpus.access == "cdi",
        logfile=prepared.builder.log,
    )
    if not lacks:
        return Way("device stage", f"the builder gave a RUN step {gpus.named}")
    if asked == "stage":
        runtime = prepared.engine.default_runtime
        other = (
            "which it is here, but it gives a step every GPU: leave GPUS= out"
            if runtime == "nvidia"
            else f"which is {runtime or 'not known'} here"
        )
        raise StageWithoutGpu(
            f"TUNE_IN=stage: no builder of this engine gives a RUN step a GPU: {lacks}",
            details=[f"the classic builder does where the engine's default runtime is nvidia, {other}"],
            hint="TUNE_IN=container uses the engine's CDI devices or its nvidia runtime",
        )
    return Way("container", f"the engine gives containers its GPUs by {gpus.access}, and no build step: {lacks}")


def filler(way: Way, request: Request, prepared: Prepared, tuner: str, unfinished: Unfinished) -> Filler:
    """What fills the tuned directory in this way."""
    previous = prepared.contexts["previous"]
    options = request.tune_options
    if way.form == "stage":
        return StageFiller(
            prepared.builder, prepared.contexts, prepared.arguments, options, unfinished, max_wait=request.max_tune
        )
    if way.form == "device stage":
        devices = prepared.gpus.devices
        return StageFiller(
            prepared.builder, prepared.contexts, prepared.arguments, options, unfinished, devices, shm_size=SHM,
            max_wait=request.max_tune,
        )  # fmt: skip
    if way.form == "classic stage":
        return ClassicFiller(prepared.client, tuner, previous, options, unfinished)
    return ContainerFiller(prepared.client, tuner, previous, options, unfinished, prepared.gpus, request.max_tune)
