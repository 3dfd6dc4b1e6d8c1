"""Choosing where the ranks run, by asking the engine; the choice and its reason are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline import log
from pipeline.contract.errors import UsageError

from .fill import ClassicFiller, ContainerFiller, Filler, StageFiller
from .prepare import Prepared
from .request import Request

Form = Literal["stage", "classic stage", "container"]


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
    if prepared.plan.device == "cpu":
        return Way("container", "asked for") if asked == "container" else Way("stage", "no GPU is needed")
    access = prepared.gpus.access
    if asked == "container":
        return Way("container", "asked for")
    if access == "default-runtime":
        return Way("classic stage", "the engine's default runtime is nvidia, which the classic builder honours")
    if asked == "stage":
        raise StageWithoutGpu(
            "TUNE_IN=stage needs an engine whose default runtime is nvidia: a RUN step has no GPU otherwise",
            hint="TUNE_IN=container uses the engine's CDI devices or its nvidia runtime",
        )
    return Way("container", f"the engine gives containers its GPUs by {access}")


def filler(way: Way, request: Request, prepared: Prepared, tuner: str) -> Filler:
    """What fills the tuned directory in this way."""
    previous = prepared.contexts["previous"]
    options = request.tune_options
    if way.form == "stage":
        return StageFiller(prepared.builder, prepared.contexts, prepared.arguments, options)
    if way.form == "classic stage":
        return ClassicFiller(prepared.client, tuner, previous, options)
    return ContainerFiller(prepared.client, tuner, previous, options, prepared.gpus, request.max_tune)
