"""All that a release uses of the road that builds images, in one place: a request, what decides its result, and the
image that came of it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cache.integrity import manifest_of
from pipeline.contract.digest import sha256_file, sha256_json
from pipeline.contract.errors import CacheRefused, PublishError, UsageError
from pipeline.contract.plan import Plan
from pipeline.contract.verdict import Verdict
from pipeline.image.bake import bake, labels, manifests_of
from pipeline.image.buildx import Export
from pipeline.image.containers import ContainerSpec, run_one
from pipeline.image.contexts import package_content, tree_digest
from pipeline.image.names import gpu_of
from pipeline.image.replay import device_name
from pipeline.image.request import Request, add_build_options, request_from
from pipeline.image.resolve import device_of, resolve
from pipeline.image.road import Finished, finish, give_name
from pipeline.image.session import Session, open_session, translated
from pipeline.image.tuner import TuneProducer
from pipeline.planning.ops import Target
from pipeline.servers import words as server_words
from pipeline.servers.model import read_model

from .matrix import Cell

# Options of a build that say how a host does it; all others say what an image is, and a matrix says those itself.
_OF_THE_HOST = frozenset(
    {
        "retune", "gpus", "require_idle", "timeout", "tune_max_wait", "compare_budget",
    }
)  # fmt: skip
_TIMEOUTS = frozenset({"--timeout"})
_CODE = ("contract", "flashinfer", "cache", "start", "tune", "servers", "log.py", "run.py")
_LIST_TIMEOUT = 300.0  # seconds that listing what is installed may take


def cell_options() -> Mapping[str, Any]:
    """The options that say what an image is, by their names in a namespace, with what they are when not given."""
    parser = argparse.ArgumentParser(add_help=False)
    add_build_options(parser)
    return {name: value for name, value in vars(parser.parse_args([])).items() if name not in _OF_THE_HOST}


def request_of(arguments: argparse.Namespace, cell: Cell) -> Request:
    """The request of a cell; raise `UsageError`, or `CacheRefused` where its caches are missing or unsound."""
    one = copy.copy(arguments)
    for name, value in {**cell.settings, "model": cell.model, "cache": cell.caches, "image": ""}.items():
        setattr(one, name, value)
    missing = [str(root) for root in cell.caches if not root.is_dir()]
    if missing:
        one.cache = ()  # all else of the cell is looked at first
    if cell.caches:  # these are for the cells that tune
        one.retune = False
    if not one.cache and not one.device.strip() and not one.arch.strip():
        one.device = "cpu"  # an image is of a device that its cell names, not of what the host happens to have
    request = request_from(one)
    for words in _sets(request) if request.server else ():
        if words.tp != cell.tp:
            raise UsageError(
                f"the server's arguments say {words.tp} tensor parallel ranks, and the cell {cell.tp}",
                hint="write {tp} into the server's args: --tensor-parallel-size {tp}",
            )
    if missing:  # no fault of the settings: this cell fails alone
        raise CacheRefused(f"{', '.join(missing)} is not a directory", hint="the cell's cache: a root above <version>/")
    return request


def ranks_of(request: Request) -> int:
    """How many ranks warm up."""
    return request.plan.layout.world if request.plan is not None else max(one.ranks for one in _sets(request))


def _sets(request: Request) -> tuple[server_words.Words, ...]:
    return server_words.parse(request.server, request.server_args, request.server_env)


def inputs_of(request: Request, cell: Cell, annotations: Mapping[str, str]) -> str:
    """One digest of all that decides an image, the same on every host, and known without a Docker Engine."""
    arch = str(cell.settings.get("arch", "")) or "90a"
    target = Target("cuda", arch) if request.device == "cuda" else None
    plan = request.make_plan(target, "").to_json() if request.make_plan is not None else None
    # The content: a path may differ from host to host.
    model = read_model(request.model).files if request.server else {}
    sources = [request.root / "versions.json"]
    for folder in ("docker", "requirements"):
        sources += sorted(path for path in (request.root / folder).rglob("*") if path.is_file())
    words = list(request.tune_options)
    options = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] not in _TIMEOUTS]
    tuned = {"options": options, "previous": tree_digest(request.previous)} if not cell.caches else {}
    return sha256_json(
        {
            "schema": 4,
            "sources": [[str(path.relative_to(request.root)), sha256_file(path)] for path in sources],
            "code": package_content(_CODE),
            "plan": plan,
            "server": [request.server, model, request.server_args, request.server_env],
            "base": [request.base_image, request.accept_base_versions],
            "modules": request.bake_jit,
            "caches": sorted(tree_digest(root) for root in cell.caches),
            "devices": cell.devices or cell.gpus,
            "platform": cell.platform,
            "annotations": dict(annotations),
            **tuned,
        }
    )


@dataclass(frozen=True)
class BuiltImage:
    """A baked and verified image in the engine."""

    done: Finished

    @property
    def config_digest(self) -> str:
        """The digest of its config."""
        return self.done.built.config_digest

    @property
    def verdict(self) -> Verdict:
        """What this host's verify found."""
        return self.done.verdict

    @property
    def producer(self) -> str:
        """What made its caches: `tune`, or a server."""
        return self.done.inputs.producer.name

    @property
    def manifests(self) -> tuple[bytes, ...]:
        """manifest.json of each key, or of the server's start, as it was baked."""
        return tuple(file.read_bytes() for file in manifests_of(self.done.warm).values())

    @property
    def gpu(self) -> str:
        """What it was tuned on, as a tag shows it."""
        return gpu_of(self.done.manifests) if self.done.manifests else device_of(self.done.inputs)

    @property
    def log(self) -> Path:
        """The log of the run."""
        return self.done.session.log

    def annotations(self) -> dict[str, str]:
        """Its labels, when it was tuned, and which base it stands on."""
        found = labels(self.done.inputs, self.done.warm)
        if self.done.manifests:
            found["org.opencontainers.image.created"] = max(one.ended for one in self.done.manifests)
        return found

    def export(self, layout: Path, name: str, annotations: Mapping[str, str], compression: str) -> str:
        """Put it into an OCI layout with SLSA provenance; return the digest of its index. Raises `BuildError`."""
        wanted = Export(layout, name, annotations, compression)
        made = bake(self.done.inputs, self.done.warm, self.done.session, wanted)
        return made.image_id

    def run(self, command: Sequence[str]) -> str:
        """What a command prints in a container of it, without network, as a user of no name. Raises `PublishError`."""
        spec = ContainerSpec(user="65532:65532", read_only=True)
        ended = run_one(self.done.session.client, self.done.built.image_id, list(command), spec, timeout=_LIST_TIMEOUT)
        if ended.status != 0:
            raise PublishError(f"{command[0]} in the image ended with {ended.status}", details=ended.stderr)
        return ended.stdout

    @property
    def wheels(self) -> Path:
        """The folder of wheelhouses, for the hashes of what is installed."""
        return self.done.session.home / "wheels"


@contextlib.contextmanager
def engine() -> Iterator[Session]:
    """An engine with the containerd image store: the classic one refuses attestations and drops annotations."""
    from pipeline.daemon import up

    up("containerd")
    with open_session("release") as session:
        yield session


def build(session: Session, request: Request, cell: Cell) -> BuiltImage:
    """Tune (or take from the store, or from the cell's caches), bake and verify. Raises the failed step's error."""
    platform = str(session.client.version().get("Arch", ""))
    if cell.platform not in ("", platform):
        raise UsageError(
            f"{cell.name} is for {cell.platform}, and this Docker Engine builds {platform}",
            hint="run this cell on a host of that platform",
        )
    with translated(session.engine):
        inputs = resolve(request, session)
        if isinstance(inputs.producer, TuneProducer):
            _check_caches(request, cell, inputs.producer.plan)
        done = finish(request, inputs, session)
        give_name(done)
        return BuiltImage(done)


def _check_caches(request: Request, cell: Cell, wanted: Plan) -> None:
    """Raise `CacheRefused` where imported caches are not what the cell's name says."""
    wrong = []
    for one in map(manifest_of, request.caches):
        plan, gpus = one.plan, one.record.host.gpus
        if plan.model != wanted.model or plan.layout != wanted.layout:
            wrong.append(f"{one.key} was tuned for {plan.model} with TP {plan.layout.tp}")
        if cell.devices and gpus and not set(gpus) <= set(cell.devices):
            wrong.append(f"{one.key} was tuned on {device_name(one)}, not on {' or '.join(cell.devices)}")
    if wrong:
        raise CacheRefused(
            f"{cell.name}: {wrong[0]}", details=wrong, hint="a cell's cache must contain that cell's keys and no others"
        )
