"""`pipeline cache add`: other caches for an image that exists; the layers below stay as they are."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.cache.tree import Stored
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.places import CODE_ROOT
from pipeline.contract.plan import Plan
from pipeline.contract.verdict import Verdict
from pipeline.flashinfer.leader import check_leader
from pipeline.home import cache_home

from .buildkit import Builder
from .caches import Baked, check_flashinfer, collect
from .complete import complete
from .contain import Sandbox, created
from .contexts import stage_key
from .device import read_processor
from .facts import probe
from .flow import discard, how_to_verify, split, tuned_root, usual_name
from .gpus import NO_GPUS, offered
from .guard import connected
from .identity import identify
from .imagelayout import check_layout
from .labels import KEY, key_labels
from .layers import strangers
from .outcome import Clock, log_file
from .prepare import prepare
from .relayer import layer_of, relayer
from .request import Request
from .staging import Staging
from .verify import How, VerifyFailed, check_present, device_name, own_keys, read_keys, verify

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine


class NotTunedImage(UsageError):
    """An image to tune again that holds no cache of ours."""


class ImageDamaged(CacheRefused):
    """The caches of an image are not sound, or are not its last layers."""


class DeviceElsewhere(UsageError):
    """No key of the image was tuned on a device that is here."""


class NoPipelineInside(UsageError):
    """An image without /opt/pipeline, torch and FlashInfer: a cache in it would be found by nobody."""


class KeyThere(UsageError):
    """The image holds a key already that shall be added to it."""


_REMEDY = "no image was changed; `pipeline build MODEL BASE_IMAGE=…` builds one anew"
_REMEDY_GRAFTED = (
    "no image was named; where a grafted cache is to blame, give one that was tuned in an image of this base: "
    "`pipeline build MODEL BASE_IMAGE=…` makes one"
)


@dataclass(frozen=True)
class Changed:
    """An image with other caches: its name, id, keys, the verdict, and the diff ids of the layers that it kept."""

    image: str
    image_id: str
    keys: tuple[str, ...]
    verdict: Verdict
    kept: tuple[str, ...]
    tune_seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "image": self.image,
            "image_id": self.image_id,
            "keys": list(self.keys),
            "kept_layers": list(self.kept),
            "tune_seconds": self.tune_seconds,
            "verdict": self.verdict.to_json(),
        }


def retune(image: str, request: Request) -> Changed:
    """Tune every key of `image` whose device is here again, and put the result in the place of the old layers.

    `request` carries the tuning options; its plan and base are taken from the image. The new image takes the old one's
    name, or `request.image`; a name is given only after a verdict that passes.
    """
    from pipeline.daemon import ensure

    logfile = log_file(cache_home(), "retune")
    engine = ensure(store=request.store or None)
    with connected(engine) as client, tempfile.TemporaryDirectory(prefix="retune-") as temporary:
        own = _own(client, engine, image, Path(temporary) / "root")
        how = _how(client, engine, image, request)
        here = [one for one in own if how.present(one.manifest)]
        if not here:
            names = ", ".join(dict.fromkeys(device_name(one.manifest) for one in own))
            raise DeviceElsewhere(f"{image} was tuned on {names}, which is not here", hint="retune it where that is")
        for one in here:
            check_leader(request.strategy, one.manifest.plan)
        made, seconds = [], 0.0
        for one in own:
            if one not in here:
                log.note(f"kept as it is: {one.key}: no {device_name(one.manifest)} here")
                made.append(one)
                continue
            plan = one.manifest.plan
            prepared = prepare(_for(request, image, plan), engine, client, logfile)
            tuned = tuned_root(replace(request, retune=True), prepared, Clock(), logfile, trust_memory=False)
            seconds += tuned.seconds
            made += tuned.keys
        name = request.image or (image if _is_name(client, image) else usual_name(tuple(k.manifest for k in made)))
        return _change(
            client,
            engine,
            image,
            name,
            logfile=logfile,
            how=how,
            drop=len(own),
            add=made,
            all_keys=made,
            seconds=seconds,
        )


def graft(image: str, roots: Sequence[Path], request: Request) -> Changed:
    """Add the keys below `roots` to `image`, a layer each; raise what stands against it before anything is made."""
    from pipeline.daemon import ensure

    keys = complete(collect(roots))
    logfile = log_file(cache_home(), "graft")
    engine = ensure(store=request.store or None)
    with connected(engine) as client, tempfile.TemporaryDirectory(prefix="graft-") as temporary:
        check_present(client, image)
        check_layout(client, image)
        _check_inside(client, image, keys)
        how = _how(client, engine, image, request)
        stored, findings = read_keys(client, image, Path(temporary) / "root")
        if stored and findings:
            raise ImageDamaged(f"{image}: {findings[0]}", details=findings[:20], hint=f"`pipeline verify {image}`")
        twice = {one.key for one in stored} & {one.key for one in keys}
        if twice:
            raise KeyThere(f"{image} holds {min(twice)} already", hint="build the image again to replace a cache")
        labelled = str(client.images.get(image).labels.get(KEY, ""))
        before = _baked(own_keys(client, image, stored)) if labelled else ()
        name = request.image or usual_name(tuple(one.manifest for one in keys))
        return _change(
            client, engine, image, name, logfile=logfile, how=how, drop=0, add=keys, all_keys=(*before, *keys)
        )


def _own(client: DockerClient, engine: Engine, image: str, root: Path) -> tuple[Baked, ...]:
    """The keys that were baked with an image; refuse one that holds none, or in which they are not the last layers."""
    check_present(client, image)
    check_layout(client, image)
    labelled = str(client.images.get(image).labels.get(KEY, ""))
    stored, findings = read_keys(client, image, root)
    if not labelled or not stored:
        raise NotTunedImage(
            f"{image} holds no tuned cache", hint="`pipeline build MODEL BASE_IMAGE=…` tunes on top of it for a model"
        )
    own = own_keys(client, image, stored)
    identity = identify(client, image, count=len(own), look=engine.look)
    findings += list(strangers(identity, own))
    if findings:
        raise ImageDamaged(
            f"the caches of {image} cannot be replaced: {findings[0]}", details=findings[:20],
            hint="`pipeline build` builds it anew",
        )  # fmt: skip
    return _baked(own)


def _baked(stored: Sequence[Stored]) -> tuple[Baked, ...]:
    return tuple(Baked(one.key, one.path, one.manifest) for one in stored if one.manifest is not None)


def _for(request: Request, image: str, plan: Plan) -> Request:
    if plan.engine is not None:  # it tunes in its own start: only the bounds reach it
        words = (*request.tune_options[:2], "--engine-max-wait", f"{request.max_tune:.0f}")
        request = replace(request, tune_options=words)
    return replace(
        request, plan=lambda _target, _version: plan, device=plan.device, base_image=image, accept_base_versions=True,
        retune=True,
    )  # fmt: skip


def _how(client: DockerClient, engine: Engine, image: str, request: Request) -> How:
    offer = offered(engine, wanted=request.gpus)
    _, gpus = probe(client, image, offer)
    processor = read_processor(client, image, local=engine.local)
    return how_to_verify(engine, gpus, processor, request.max_wait)


def _is_name(client: DockerClient, image: str) -> bool:
    tags = client.images.get(image).tags
    return image in tags or f"{image}:latest" in tags


def _check_inside(client: DockerClient, image: str, keys: Sequence[Baked]) -> None:
    from docker.errors import NotFound

    facts, _ = probe(client, image, NO_GPUS)
    inside = True
    with created(client, image, ["true"], Sandbox()) as container:
        try:
            container.get_archive(CODE_ROOT)
        except NotFound:
            inside = False
    if not inside or not facts.complete:
        lacks = CODE_ROOT if facts.complete else "torch and FlashInfer"
        raise NoPipelineInside(
            f"{image} has no {lacks}: nothing in it would use a cache",
            hint=f"`pipeline build MODEL --base-image {image} --cache DIR` builds on top of it",
        )
    check_flashinfer(
        keys,
        facts.packages["flashinfer-python"],
        hint="nothing was changed; FlashInfer ignores a cache of another version: tune with the image's own",
    )


def _change(
    client: DockerClient, engine: Engine, image: str, name: str, *, logfile: Path, how: How, drop: int,
    add: Sequence[Baked], all_keys: Sequence[Baked], seconds: float = 0.0,
) -> Changed:  # fmt: skip
    """Make the layers, the image, its verdict, and only then its name."""
    from pipeline.daemon.buildx import environment

    staging = Staging(cache_home())
    builder = Builder(environment(engine), b"", staging.folder, staging.empty(), logfile)
    old = [str(one) for one in client.images.get(image).attrs["RootFS"]["Layers"]]
    with log.step("put the cache layers on"):
        layers = []
        for one in add:
            with tempfile.TemporaryDirectory(dir=staging.folder, prefix="layer-") as temporary:
                layers.append(layer_of(client, builder, stage_key(one, Path(temporary) / "tuned")))
        said = f"COPY / / # tuned cache, by pipeline {'retune' if drop else 'graft'}"
        labels = key_labels(all_keys)
        made = relayer(client, image, drop=drop, layers=layers, labels=labels, said=said, look=engine.look)
    try:
        verdict = verify(client, made, how)
        if verdict.result != "pass":
            raise VerifyFailed(verdict, _REMEDY if drop else _REMEDY_GRAFTED)
    except BaseException:
        discard(client, made)
        raise
    repository, tag = split(name)
    if verdict.level != "replay" and not tag.endswith("-unverified"):
        tag += "-unverified"
    client.images.get(made).tag(repository, tag)
    kept = tuple(old[: len(old) - drop])
    return Changed(f"{repository}:{tag}", made, tuple(str(one.key) for one in all_keys), verdict, kept, seconds)
