"""What a report says of an image: read from its labels, manifests and layers, and from what this host kept of it.

<cache home>/reports/<identity>.json    the last verdict of that image here, and the seconds of the steps that made it
<cache home>/reports/<image>.html       the page that its build wrote
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import image_identity
from pipeline.contract.errors import CacheRefused, PipelineError
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Covered, Manifest
from pipeline.contract.places import CACHE_ROOT
from pipeline.contract.verdict import Verdict
from pipeline.image.names import INPUTS, MODULES, PREFIX, PRODUCER
from pipeline.image.replay import cache_root_of, device_name, read_keys
from pipeline.servers.containers import manifest_in
from pipeline.servers.manifest import ServerManifest
from pipeline.servers.producer import from_manifest, manifest_of

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.image.road import Outcome

_BASE = "org.opencontainers.image.base"


@dataclass(frozen=True)
class Cache:
    """One kind of cache: where it lies, its bytes, and what verify found of it; empty where nothing was tried."""

    kind: str
    path: str
    bytes: int
    result: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer by its diff id, lowest first; `size` in bytes, None where the engine does not say."""

    diff_id: str
    size: int | None
    made_by: str


@dataclass(frozen=True)
class Facts:
    """One image.

    `starts` maps `cold`, `warm` and `baked …` to seconds by phase, `ready` being the whole; empty where no server
    warmed up. `options` and `words` stand before and after the image's name in `docker run`. `steps` are seconds.
    `layers` are empty where the engine was not asked for them.
    """

    image: str
    model: str
    producer: str
    device: str
    ranks: int
    size: int
    digests: Mapping[str, str]
    starts: Mapping[str, Mapping[str, float]]
    caches: tuple[Cache, ...]
    tuned: tuple[Covered, ...]
    versions: Mapping[str, str]
    options: tuple[str, ...]
    words: tuple[str, ...]
    verdict: Verdict | None
    layers: tuple[Layer, ...] = ()
    steps: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def keep(home: Path, verdict: Verdict, steps: Mapping[str, float]) -> None:
    """Keep what the image itself cannot say: a verdict on it, and what its steps took, if it was made here."""
    write_json(_kept(home, verdict.identity), {"verdict": verdict.to_json(), "steps": dict(steps)})


def kept(home: Path, identity: str) -> tuple[Verdict | None, dict[str, float]]:
    """What was kept of an image; nothing where no build or verify of it was here."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, PipelineError):
        value = json.loads(_kept(home, identity).read_text(encoding="utf-8"))
        return Verdict.from_json(value["verdict"]), {str(name): float(s) for name, s in value["steps"].items()}
    return None, {}


def _kept(home: Path, identity: str) -> Path:
    return home / "reports" / f"{identity.rpartition(':')[2][:32]}.json"


def gather(client: DockerClient, name: str, home: Path, verdict: Verdict | None = None) -> Facts:
    """Read an image of the engine. `verdict` is used instead of the one kept here.

    Raises `CacheRefused` for an image without our caches, and for a verdict on another image.
    """
    image = client.images.get(name)
    config = image.attrs.get("Config") or {}
    diff_ids = [str(one) for one in image.attrs["RootFS"]["Layers"]]
    identity = image_identity(tuple(diff_ids), config)
    here, steps = kept(home, identity)
    if verdict is not None and verdict.identity != identity:
        raise CacheRefused(
            f"the verdict is on another image ({verdict.identity}), not on {name} ({identity})",
            hint=f"`pipeline verify {name} -o verdict.json` makes one",
        )
    labels = image.labels
    common = {
        **_common(name, image.attrs, verdict or here, steps),
        "layers": tuple(layers_of(diff_ids, image.history())),
    }
    if labels.get(PRODUCER, "tune") != "tune":
        return of_server(manifest_in(client, name)[0], config.get("Entrypoint") or (), common)
    with tempfile.TemporaryDirectory(prefix="report-") as temporary:
        root = Path(temporary) / "root"
        keys, findings = read_keys(client, name, root)
        manifests = [one.manifest for one in keys if one.manifest is not None]
        if not manifests:
            raise CacheRefused(findings[0] if findings else f"{name} has no tuned cache", hint="build it again")
        size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    baked = Cache("flashinfer-autotune", cache_root_of(client, name), size)
    return of_tuner(manifests, baked, str(labels.get(MODULES, "")), common)


def of_outcome(outcome: Outcome) -> Facts:
    """The facts of an image that was built a moment ago, but for its layers: the engine is not asked again."""
    done = outcome.finished
    common = _common(outcome.image, outcome.attrs, done.verdict, dict(outcome.steps))
    if done.inputs.producer.name != "tune":
        told = manifest_of(done.warm.root.parent)
        return of_server(told, outcome.attrs["Config"].get("Entrypoint") or (), common)
    size = sum(one.bytes for one in done.warm.caches if one.kind == "flashinfer-autotune")
    baked = Cache("flashinfer-autotune", CACHE_ROOT, size)
    return of_tuner(done.manifests, baked, done.warm.labels.get(MODULES, ""), common)


def _common(name: str, attrs: Mapping[str, Any], verdict: Verdict | None, steps: Mapping[str, float]) -> dict[str, Any]:
    """What is the same for every producer; `attrs` are what the engine says of the image."""
    config = attrs.get("Config") or {}
    labels = config.get("Labels") or {}
    return {
        "image": name,
        "model": str(labels.get(f"{PREFIX}.model", "")),
        "size": int(attrs.get("Size", 0)),
        "digests": {
            "identity": image_identity(tuple(str(one) for one in attrs["RootFS"]["Layers"]), config),
            "image id": str(attrs["Id"]),
            "pushed as": ", ".join(attrs.get("RepoDigests") or ()),
            "inputs": str(labels.get(INPUTS, "")),
            "base": str(labels.get(f"{_BASE}.name", "")),
            "base digest": str(labels.get(f"{_BASE}.digest", "")),
        },
        "verdict": verdict,
        "steps": steps,
    }


def of_tuner(manifests: Sequence[Manifest], baked: Cache, modules: str, common: Mapping[str, Any]) -> Facts:
    """The facts of an image whose caches our tuner made. `modules` are the names of the baked modules, by commas."""
    names = [name for name in modules.split(",") if name]
    compiled = {one.name: one.size for manifest in manifests for one in manifest.modules if one.name in names}
    caches = [baked, *([Cache("flashinfer-modules", "", sum(compiled.values()))] if compiled else [])]
    verdict: Verdict | None = common["verdict"]
    calls = verdict.checks.get("replayed calls", 0) if verdict else 0
    hits = f"{verdict.checks.get('hits', 0)} of {calls} calls hit" if verdict and calls else ""
    record = manifests[0].record
    return Facts(
        **{
            **common,
            "model": common["model"] or manifests[0].plan.model,
            "digests": {**common["digests"], "cache key": ", ".join(one.key for one in manifests)},
        },
        producer="tune",
        device=", ".join(dict.fromkeys(device_name(one) for one in manifests)),
        ranks=max(len(one.ranks) for one in manifests),
        starts={},
        caches=tuple(Cache(one.kind, one.path, one.bytes, hits) for one in caches),
        tuned=tuple(row for one in manifests for row in one.covered),
        versions={
            **{name: value for name, value in record.flashinfer.items() if value != "unknown" and name != "gpu"},
            **record.packages,
            **({"driver": record.host.driver} if record.host.driver else {}),
        },
        options=() if all(one.substitutions for one in manifests) else ("--gpus", "all"),
        words=("env",),
        notes=tuple(dict.fromkeys(note for one in manifests for note in (*one.substitutions, *one.notes))),
    )


def of_server(told: ServerManifest, entrypoint: Sequence[str], common: Mapping[str, Any]) -> Facts:
    """The facts of an image that a server's own start warmed up."""
    verdict: Verdict | None = common["verdict"]
    producer = from_manifest(told)
    options, words = producer.shown(entrypoint)
    starts: dict[str, dict[str, float]] = {}
    for at, served in enumerate(told.sets):
        which = f", set {at + 1}" if at else ""
        for name, one in ((f"cold{which}", served.cold), (f"warm{which}", served.warm)):
            starts[name] = {**one.seconds, "ready": one.ready}
    if verdict is not None:
        starts |= {f"baked, {who}": dict(seconds) for who, seconds in verdict.starts.items()}
    return Facts(
        **{**common, "digests": {**common["digests"], "cache key": verdict.key if verdict else ""}},
        producer=told.server,
        device=told.device,
        ranks=producer.ranks,
        starts=starts,
        caches=tuple(Cache(kind, "", size, _result(kind, verdict)) for kind, size in sorted(told.caches.items())),
        tuned=(),
        versions=told.versions,
        options=(*(() if told.device == "cpu" else ("--gpus", "all")), *options),
        words=words,
        notes=told.notes,
    )


def _result(kind: str, verdict: Verdict | None) -> str:
    """What the second starts found of one kind."""
    if verdict is None or verdict.level != "replay":
        return ""
    wrong = [one for one in verdict.findings if f": {kind} " in one]
    if wrong or verdict.findings:
        return "; ".join(wrong)
    starts = verdict.checks.get("starts", 0)
    return f"hit in {starts} of {starts} starts"


def layers_of(diff_ids: Sequence[str], history: Sequence[Mapping[str, Any]]) -> Iterator[Layer]:
    """Layers, lowest first, with what the history says of each where it says it of all of them."""
    sized = [one for one in reversed(history) if int(one.get("Size", 0)) > 0]
    for at, diff_id in enumerate(diff_ids):
        if len(sized) == len(diff_ids):
            yield Layer(diff_id, int(sized[at]["Size"]), str(sized[at].get("CreatedBy", ""))[:160])
        else:
            yield Layer(diff_id, None, "")
