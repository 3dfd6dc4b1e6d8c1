"""What a warm-up leaves, whoever made it, and how the host keeps it: the interface between the road and its producers.

    <cache home>/warm-ups/<inputs digest>/
        root/           files exactly as they lie from `/` of the image
        warmup.json     directories by kind, variables, manifests, seconds; `inputs` in clear

A producer is FlashInfer's own tuner (`image/tuner.py`) or a server (`pipeline/servers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.contract.errors import CacheRefused
from pipeline.contract.files import write_json
from pipeline.contract.verdict import Level

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine

    from .gpus import Gpus

WARMUP_FILE = "warmup.json"
ROOT_FOLDER = "root"
SCHEMA = 1


@dataclass(frozen=True)
class CacheDir:
    """One kind of cache: a directory of the image, and how it must be baked.

    `kind` is such as `flashinfer-autotune`, `flashinfer-modules`, `torch-compile`, `triton`, `model-info`. `path` is
    the final absolute path. `keep_times` says that whoever reads it compares file times (ninja), `writable` that the
    server writes beside it, so that any user must be able to.
    """

    kind: str
    path: str
    bytes: int
    keep_times: bool = False
    writable: bool = False


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up left: files below `root` as they lie from `/`, static ENV of the image, manifests in the image.

    `seconds` is what it cost. `labels` are further labels of the image.
    """

    root: Path
    caches: tuple[CacheDir, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    manifests: tuple[str, ...] = ()
    seconds: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What a producer works with.

    `image` is the id of the image in which it runs: the tuner image, or the one that serves. `scratch` is an empty
    folder for what it makes. `timeout` bounds a warm-up, `startup` one start of the finished image; both in seconds.
    """

    client: DockerClient
    engine: Engine
    image: str
    gpus: Gpus
    log: Path
    scratch: Path
    timeout: float
    startup: float


@dataclass(frozen=True)
class Proof:
    """What fresh containers of a finished image showed. `findings` is empty where all is well.

    `level` is `replay` where every key or start was tried on the device that it was made for. `checks` counts what was
    looked at. `keys` are those of the image (of a server: its name and the hashes that its caches lie under), `proven`
    those that were tried (all, where `keys` is empty), `manifests` the sha256 of each manifest, `device` what it was
    warmed up on. `starts` has the seconds by phase of each start of a server.
    """

    level: Level
    checks: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    device: str = ""
    starts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Producer(Protocol):
    """Makes caches and proves that an image uses them."""

    @property
    def name(self) -> str:
        """`tune`, `vllm` or `sglang`."""

    @property
    def model(self) -> str:
        """A short name of the model, for the image's name."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def ranks(self) -> int:
        """How many GPUs it needs, or CPU ranks."""

    @property
    def made_on(self) -> str:
        """What its caches were made on elsewhere, as it stands in an image's name; empty where it makes them itself."""

    def shown(self, entrypoint: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Options of `docker run`, and the words after the image's name, that try the image; secrets are hidden."""

    def inputs(self) -> Mapping[str, object]:
        """What of it decides what is baked, as JSON values: part of the inputs digest."""

    def build(self) -> str:
        """Build the image in which it warms up, and return its id; empty: it runs in the base, which will serve."""

    def warm_up(self, job: Job) -> WarmUp:
        """Make the caches below `job.scratch`. Raises `WarmUpError` or `CacheRefused`."""

    def prove(self, image: str, job: Job) -> Proof:
        """Start fresh containers of `image`: as root, as another user, read-only; no network."""


class EntryInvalid(CacheRefused):
    """A store entry cannot be read, or its warmup.json does not describe what lies beside it."""


def write_entry(place: Path, warm_up: WarmUp, inputs: Mapping[str, object]) -> None:
    """Write warmup.json of the entry `place`, whose `root/` is complete."""
    value: dict[str, Any] = asdict(warm_up)
    del value["root"]
    write_json(place / WARMUP_FILE, {"schema": SCHEMA, **value, "inputs": dict(inputs)})


def read_entry(place: Path) -> WarmUp:
    """Read an entry. Raises `EntryInvalid`: no entry, another schema, or a directory that is not there."""
    try:
        value = json.loads((place / WARMUP_FILE).read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise ValueError(f"schema {value['schema']}, this version reads {SCHEMA}")
        found = WarmUp(
            root=place / ROOT_FOLDER,
            caches=tuple(CacheDir(**one) for one in value["caches"]),
            environment={str(k): str(v) for k, v in value["environment"].items()},
            manifests=tuple(map(str, value["manifests"])),
            seconds=float(value["seconds"]),
            labels={str(k): str(v) for k, v in value["labels"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EntryInvalid(f"{place}: {error}", hint="--retune makes it again") from error
    for one in found.caches:
        path = PurePosixPath(one.path)
        if not path.is_absolute() or ".." in path.parts or not (found.root / one.path.lstrip("/")).is_dir():
            raise EntryInvalid(f"{place}: {one.path} is not in it", hint="--retune makes it again")
    return found
