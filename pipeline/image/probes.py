"""What the engine says of bases and GPUs, asked once: for a caller that prepares many images in one run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.files import write_json

from .base import Base
from .facts import BaseFacts, probe
from .gpus import Gpus
from .wrap import Runs

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass(frozen=True)
class Probes:
    """What the engine said in this run: bases by the reference that was asked for (empty: the pinned one), and by the
    image's id what they run and what is in them.
    """

    bases: dict[str, Base] = field(default_factory=dict)
    runs: dict[str, Runs] = field(default_factory=dict)
    facts: dict[tuple[str, Gpus], tuple[BaseFacts, Gpus]] = field(default_factory=dict)


def probed(client: DockerClient, base: Base, offer: Gpus, home: Path, probes: Probes) -> tuple[BaseFacts, Gpus]:
    """Facts of a base, remembered by its id; with GPUs each run asks once, since those change."""
    if (base.image_id, offer) in probes.facts:
        return probes.facts[base.image_id, offer]
    place = home / "base" / f"{base.image_id.replace(':', '-')}-4.json"
    if offer.access == "none" and place.is_file():
        told = json.loads(place.read_text(encoding="utf-8"))
        return BaseFacts(**{**told, "glibc": tuple(told["glibc"])}), offer
    facts, gpus = probe(client, base.reference, offer)
    if offer.access == "none":
        write_json(place, asdict(facts))
    probes.facts[base.image_id, offer] = facts, gpus
    return facts, gpus
