"""`pipeline cache add`: further FlashInfer caches for an image that exists: a FROM and a COPY for each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.cache.tree import Stored
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_ROOT, CODE_ROOT
from pipeline.contract.scratch import scratch
from pipeline.contract.verdict import Verdict

from . import base as bases
from .buildx import Build, Built, SnapshotLost, build
from .caches import check_flashinfer, collect, copy_below
from .containers import ContainerSpec, created
from .contexts import settle, stage_layer
from .dockerfile import Layer, finished, without_links
from .gpus import NO_GPUS, offered
from .names import ENVIRONMENT, INPUTS, KEY, PREFIX, gpu_of, split, usual_name
from .probe import destinations, probe
from .replay import Here, prove, read_keys
from .session import Session, open_session
from .tag import check_free, tag
from .tuner import key_labels, variables
from .verify import VerifyFailed, verdict_of

_REMEDY = (
    "no image was named; where an added cache is to blame, give one that was tuned in an image of this base: "
    "`pipeline build MODEL --base-image …` makes one"
)


@dataclass(frozen=True)
class Added:
    """An image with further caches: its name, id, keys and verdict."""

    image: str
    image_id: str
    keys: tuple[str, ...]
    verdict: Verdict

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "image": self.image,
            "image_id": self.image_id,
            "keys": list(self.keys),
            "verdict": self.verdict.to_json(),
        }


def add_caches(image: str, roots: Sequence[Path], *, name: str = "", timeout: float = 1200.0) -> Added:
    """Add the keys below `roots` to `image`, a layer each, and verify the result."""
    keys = collect(roots)
    with open_session("cache-add") as session:
        if name:
            check_free(session.client, *split(name))
        base = bases.find(session.client, image, "given")
        if base is None:
            raise UsageError(f"there is no image {image} in the engine", hint="`docker images` lists what there is")
        facts, _ = probe(session, base, NO_GPUS)
        _check_inside(session, image, complete=facts.complete)
        check_flashinfer(
            keys,
            facts.packages["flashinfer-python"],
            hint="nothing was changed; FlashInfer ignores a cache of another version: tune with the image's own",
        )
        labels = {str(k): str(v) for k, v in (base.config.get("Labels") or {}).items()}
        _check_keys(session, image, [str(one.key) for one in keys], labels)
        folder = session.home / "contexts"
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder, ".add-") as work:
            built, manifests = _build(session, base, keys, work, labels)
        _, gpus = probe(session, base, offered(session.engine))
        here = Here(gpus, facts.processor, facts.machine)
        proof = prove(session.client, session.candidate, here, level="replay", timeout=timeout)
        verdict = verdict_of(session.client, session.candidate, proof)
        if verdict.result != "pass":
            raise VerifyFailed(verdict, _REMEDY)
        plan = manifests[0].plan
        digest = sha256_json([base.image_id, [str(one.key) for one in keys]])
        usual = usual_name(plan.model, plan.layout.world, gpu_of(manifests), f"fi{plan.flashinfer_version}", digest)
        repository, wanted_tag = split(name or usual)
        if verdict.level != "replay" and not wanted_tag.endswith("-unverified"):
            wanted_tag += "-unverified"
        final = tag(session.client, session.candidate, repository, wanted_tag)
        return Added(final, built.image_id, proof.keys, verdict)


def _build(
    session: Session, base: bases.Base, keys: Sequence[Stored], work: Path, labels: dict[str, str]
) -> tuple[Built, list[Manifest]]:
    """The image with a layer for each key, under this run's candidate name."""
    root = work / "root"
    manifests = [copy_below(one, root / CACHE_ROOT.lstrip("/")) for one in keys]
    settle(root)
    paths = [f"{CACHE_ROOT}/{manifest.key}" for manifest in manifests]
    places = destinations(session, base, paths)
    layers, contexts = [], {}
    for at, path in enumerate(paths):
        where, context = places[path], f"cache-{at}"
        contexts[context] = stage_layer(root, path, where, work / context, keep_times=False, writable=False)
        layers.append(Layer(context, where.path, linked=where.linked))
    more = _labels(labels, key_labels(manifests, root))
    environment = variables([]) if KEY in labels else variables(manifests)
    environment = {**environment, **({"PIPELINE_TUNED_CACHE": ""} if KEY in labels else {})}
    more[ENVIRONMENT] = json.dumps(environment, sort_keys=True)
    text = finished(f"FROM {base.reference} AS final\n".encode(), layers, environment, None)
    wanted = Build(text, "final", contexts, labels=more, tag=session.candidate)
    with log.step("add the caches"):
        try:
            return build(session, wanted), manifests
        except SnapshotLost:
            log.note("BuildKit has lost a snapshot of the image: added with plain copies")
            plain = Build(without_links(text), "final", contexts, labels=more, tag=session.candidate)
            return build(session, plain), manifests


def _check_inside(session: Session, image: str, *, complete: bool) -> None:
    """Refuse an image in which nothing would use a cache."""
    from docker.errors import NotFound

    inside = True
    with created(session.client, image, ["true"], ContainerSpec()) as container:
        try:
            container.get_archive(CODE_ROOT)
        except NotFound:
            inside = False
    if not inside or not complete:
        lacks = CODE_ROOT if complete else "torch and FlashInfer"
        raise UsageError(
            f"{image} has no {lacks}: nothing in it would use a cache",
            hint=f"`pipeline build MODEL --base-image {image} --cache DIR` builds on top of it",
        )


def _check_keys(session: Session, image: str, keys: Sequence[str], labels: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="add-") as temporary:
        stored, findings = read_keys(session.client, image, Path(temporary) / "root")
    if stored and findings:
        raise CacheRefused(f"{image}: {findings[0]}", details=findings[:20], hint=f"`pipeline verify {image}`")
    twice = {str(one.key) for one in stored} & set(keys)
    if twice:
        raise UsageError(f"{image} has {min(twice)} already", hint="`pipeline build … --retune` makes a cache again")
    if labels.get(KEY) and not stored:
        raise CacheRefused(
            f"the caches that the label of {image} names are not in it", hint=f"`pipeline verify {image}`"
        )


def _labels(before: dict[str, str], added: dict[str, str]) -> dict[str, str]:
    """The labels of keys, those that were there first; the image's inputs are its own and what was added."""
    found = {}
    for name in (KEY, f"{PREFIX}.plan", f"{PREFIX}.manifest"):
        found[name] = ",".join(filter(None, (before.get(name, ""), added[name])))
    for name in (f"{PREFIX}.flashinfer", f"{PREFIX}.arch"):
        found[name] = ",".join(dict.fromkeys([*filter(None, before.get(name, "").split(",")), *added[name].split(",")]))
    found[INPUTS] = sha256_json([before.get(INPUTS, ""), added[KEY], added[f"{PREFIX}.manifest"]])
    return found
