"""What was asked of a release, once, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import UsageError
from pipeline.image.prepare import Prepared
from pipeline.image.request import Request
from pipeline.image.staging import tree_digest
from pipeline.registry.reference import Reference

from .cells import Cell
from .names import DEFAULT, DEFAULT_WITH_ENGINE, Names
from .sign import Signer

SCHEMA = 1  # raise when an image of the same inputs would be released otherwise
_USUAL = "tuned"  # the repository where only a registry's host was named
_ONLY_TUNING = ("device", "options", "previous")


class RegistryUnnamed(UsageError):
    """No registry was named."""


@dataclass(frozen=True)
class Ask:
    """Where to, under which names, and with what beside the images."""

    root: Path
    place: Reference
    template: str = ""
    moves: tuple[str, ...] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    signer: Signer | None = None
    signed_by: str = ""  # the sha256 of the signer's public key; empty where the key was not opened
    dry_run: bool = False
    again: bool = False  # tune again: what is there already does not count

    def template_of(self, cell: Cell) -> str:
        """The template of a cell's tag."""
        return self.template or (DEFAULT_WITH_ENGINE if cell.engine else DEFAULT)


def place_from(text: str) -> Reference:
    """`host[:port][/repository]`; raise `RegistryUnnamed` or `ReferenceInvalid`."""
    text = text.strip().rstrip("/")
    if not text:
        raise RegistryUnnamed("no registry was named", hint="--registry registry.example:5000/team/tuned (REGISTRY=…)")
    found = Reference.in_registry(text if "/" in text else f"{text}/{_USUAL}")
    if found.tag or found.digest:
        raise RegistryUnnamed(f"{text} is an image; its tag is made by the template", hint=f"--registry {found.name}")
    return found


def names_of(cell: Cell, prepared: Prepared) -> Names:
    """What is known of a cell's tag before its image is there."""
    plan = prepared.plan
    gpu = cell.gpu
    if not gpu and plan.device == "cpu":
        gpu = plan.arch
    elif not gpu and prepared.gpus.gpus:
        gpu = prepared.gpus.gpus[0].name.removeprefix("NVIDIA ")
    return Names(plan.model, plan.layout.tp, plan.flashinfer_version, gpu, cell.engine)


def inputs_of(ask: Ask, cell: Cell, request: Request, prepared: Prepared) -> str:
    """The release's inputs digest: all that decides what would be built, tuned and said of it.

    Of an image whose caches were tuned elsewhere, what only tuning would read stays out: the device of whoever bakes.
    """
    decides: dict[str, Any] = dict(prepared.decides)
    if cell.caches:
        decides = {name: value for name, value in decides.items() if name not in _ONLY_TUNING}
    return sha256_json(
        {
            "schema": SCHEMA,
            "image": decides,
            "caches": sorted(tree_digest(root) for root in cell.caches),
            "modules": request.bake_jit,
            "annotations": dict(ask.own),
        }
    )
