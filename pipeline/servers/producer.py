"""A server's own start as a producer of caches: warm up in a container of its image, prove in fresh ones.

cold start → warm starts until one writes nothing new → caches by kind → baked image → starts as others would make them
"""

from __future__ import annotations

import io
import re
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import CacheRefused, UsageError, WarmUpError
from pipeline.image.producer import ROOT_FOLDER, CacheDir, Place, Proof, WarmUp

from . import collect, judge, kinds, manifest
from .adapter import Adapter
from .containers import How, Watched, watch
from .judge import Summary
from .known import adapter_of
from .manifest import ServerManifest
from .model import laid
from .phases import why
from .starts import Spec, Start
from .words import Words

if TYPE_CHECKING:
    from docker import DockerClient

MOST = 3  # one cold start and two warm ones
RULES = 1  # raise it when the same words would leave other files
_ENV_HF_HOME = "HF_HOME"
_HF_HOME = "/root/.cache/huggingface"
_ANOTHER_USER = "12345:12345"
# Who starts the finished image: a Kubernetes pod with its own command, user and a read-only root; and root itself.
PROOFS = (How(user=_ANOTHER_USER, read_only=True), How(user="0:0"))


@dataclass(frozen=True)
class ServerProducer:
    """`files` are the model's config files by name, `device` is cpu or cuda."""

    words: Words
    files: Mapping[str, str]
    model_name: str
    device: str

    @property
    def name(self) -> str:
        """The server's."""
        return self.words.server

    @property
    def model(self) -> str:
        """A short name."""
        return self.model_name

    @property
    def ranks(self) -> int:
        """As its words say."""
        return self.words.ranks

    @property
    def adapter(self) -> Adapter:
        """What is known of the server."""
        return adapter_of(self.words.server)

    def shown(self, entrypoint: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The model's folder, mounted, and the words that were baked; its serve command if the entrypoint lacks it."""
        mount = ("-v", f"/your/model:{self.words.model}:ro") if self.words.model.startswith("/") else ()
        serves = any(self.name in word for word in entrypoint)
        return mount, (*(() if serves else self.adapter.serve), *self.words.recorded())

    def inputs(self) -> Mapping[str, object]:
        """Words without values of secrets, and the model's config."""
        return {
            "server": self.words.server,
            "arguments": list(self.words.recorded()),
            "environment": dict(self.words.environment),
            "secrets": sorted(self.words.secrets),
            "model": dict(self.files),
            "placed": self.adapter.environment(kinds.ROOT),
            "rules": RULES,
        }

    def environment(self) -> dict[str, str]:
        """The static ENV of the image. Raises `UsageError` where a word would place a cache elsewhere."""
        placed = self.adapter.environment(kinds.ROOT)
        clash = sorted(name for name, value in self.words.environment.items() if placed.get(name, value) != value)
        if clash:
            raise UsageError(
                f"SERVER_ENV sets {clash[0]}, which places a cache that is baked below {kinds.ROOT}",
                hint="leave it out",
            )
        return {**placed, **self.words.environment}

    def spec(self, *, ready: float, most: int, pack: bool) -> Spec:
        """What is started, and asked."""
        adapter = self.adapter
        return Spec(
            command=adapter.command(self.words),
            environment={**self.environment(), **self.words.secrets},
            health=adapter.health,
            requests=adapter.requests(self.words),
            token=adapter.token(self.words),
            ready=ready,
            most=most,
            pack=pack,
            facts=adapter.facts if pack else (),
        )

    def warm_up(self, place: Place) -> WarmUp:
        """Start until a start writes nothing new. Raises `WarmUpError`, `UsageError` or `CacheRefused`."""
        began = time.monotonic()
        placed = laid(self.words, self.files, _hf_home(place.client, place.image, self.words))
        spec = self.spec(ready=place.timeout / MOST, most=MOST, pack=True)
        how = How(options=place.gpus.options())
        with log.step(f"start {self.name} up to {MOST} times"):
            watched = watch(
                place.client, place.image, spec, placed, how, out=place.scratch / "watched", logfile=place.log
            )
        check(self.name, watched.starts, str(place.log))
        warm = described(self, watched, place.scratch / ROOT_FOLDER, placed)
        return replace(warm, seconds=time.monotonic() - began)

    def prove(self, image: str, place: Place) -> Proof:
        """Start the finished image as others would: no network, another command, another user, a read-only root."""
        told, text = manifest_in(place.client, image)
        digest = sha256_json(text)
        keys = (f"{told.server}/{digest[:16]}",)
        if told.device != "cpu" and not place.gpus.options():
            return Proof("static", {"manifests": 1}, keys=keys, manifests=(digest,), device=told.device)
        found: list[str] = []
        seconds: dict[str, Mapping[str, float]] = {}
        baked = sorted(told.caches)
        for number, proof in enumerate(PROOFS):
            how = replace(proof, options=place.gpus.options())
            with log.step(f"start {self.name} in the finished image {how}"):
                spec = self.spec(ready=place.startup, most=1, pack=False)
                watched = watch(
                    place.client, image, spec, told.model, how,
                    out=place.scratch / f"proof-{number}", logfile=place.log,
                )  # fmt: skip
            start = watched.starts[-1]
            found += [f"{how}: {one}" for one in judge.findings(baked, told.warm, start, self.adapter)]
            _say(told, start, self.adapter, baked)
            if start.outcome == "ready":
                seconds[str(proof)] = {**Summary.of(self.adapter, start).seconds, "ready": start.ready}
        checks = {"starts": len(PROOFS), "kinds": len(baked)}
        return Proof("replay", checks, tuple(found), keys, () if found else keys, (digest,), told.device, seconds)


def producer_of(client: DockerClient, image: str) -> ServerProducer:
    """The producer that proves an image which exists: its words are in the manifest, but for secrets."""
    return from_manifest(manifest_in(client, image)[0])


def from_manifest(told: ServerManifest) -> ServerProducer:
    """The producer that an image's manifest describes."""
    words = Words(told.server, told.arguments, told.environment)
    return ServerProducer(words, {}, told.server, "cpu" if told.device == "cpu" else "cuda")


def _say(told: ServerManifest, start: Start, adapter: Adapter, baked: list[str]) -> None:
    if start.outcome != "ready":
        return
    now = Summary.of(adapter, start)
    log.note(f"ready after {now.ready:.1f} s (warm {told.warm.ready:.1f} s, cold {told.cold.ready:.1f} s)")
    for one in judge.by_kind(baked, told.warm, now):
        log.note(f"{one.kind}: {one.result}" + (f" ({one.said})" if one.said else ""))


def described(producer: ServerProducer, watched: Watched, root: Path, placed: Mapping[str, str]) -> WarmUp:
    """Lay out below `root` what starts left that all ended well, and describe it. Raises `CacheRefused`."""
    adapter, words, starts = producer.adapter, producer.words, watched.starts
    if watched.pack is None:
        raise CacheRefused(f"{producer.name} left no caches", details=starts[-1].tail())
    laid_out = collect.lay(watched.pack, root, starts, words.secret_values())
    watched.pack.unlink()
    notes = [*watched.notes, *_growing(starts), *_version(adapter, watched.facts)]
    for note in notes:
        log.warn(note)
    if laid_out.others:
        size = sum(laid_out.others.values())
        log.note(f"{len(laid_out.others)} files of no known kind are not baked ({size / 1e6:.1f} MB): see the manifest")
    sizes: dict[str, int] = {}
    for (kind, _), size in laid_out.places.items():
        sizes[kind] = sizes.get(kind, 0) + size
    told = ServerManifest(
        server=words.server,
        arguments=words.recorded(),
        environment=producer.environment(),
        secrets=tuple(sorted(words.secrets)),
        model=placed,
        versions=watched.facts.get("versions", {}),
        hashed=tuple(watched.facts.get("hashed", ())),
        device=str(watched.facts.get("gpu") or "cpu"),
        cold=Summary.of(adapter, starts[0]),
        warm=Summary.of(adapter, starts[-1]),
        caches=sizes,
        not_baked=dict(sorted(laid_out.others.items())[:200]),
        notes=tuple(notes),
    )
    manifest.write(root, told)
    collect.search(root / manifest.PLACE.lstrip("/"), words.secret_values())
    for line in told.table():
        log.note(line)
    caches = [
        CacheDir(kind, path, size, writable=path.startswith(kinds.ROOT))
        for (kind, path), size in sorted(laid_out.places.items())
    ]
    size = (root / manifest.FILE.lstrip("/")).stat().st_size
    caches.append(CacheDir(kinds.MANIFEST, manifest.PLACE, size))
    version = told.versions.get(words.server) or told.versions.get(f"{words.server}-cpu", "")
    return WarmUp(
        root=root,
        caches=tuple(caches),
        environment=told.environment,
        manifests=(manifest.FILE,),
        labels={"pipeline.server": f"{words.server} {version}".strip(), "pipeline.server.device": told.device},
    )


def check(name: str, starts: tuple[Start, ...], logfile: str) -> None:
    """Raise `WarmUpError` where the last start failed: the server's own words first."""
    last = starts[-1]
    if last.outcome == "ready":
        return
    said = why(last.tail(400))
    raise WarmUpError(
        f"{name}, start {len(starts)}: {last.message}" + (f": {said}" if said else ""),
        details=last.tail(30),
        hint="its own last lines are above; the same arguments must start in this image",
        log=logfile,
    )


def _growing(starts: tuple[Start, ...]) -> list[str]:
    """The kinds that still got new files in the last start of all."""
    if len(starts) < MOST:
        return []
    return [
        f"{kind} grows with every start: {count} new files in start {len(starts)}; it will in the image too"
        for kind, count in sorted(kinds.count(starts[-1].new).items())
    ]


def _version(adapter: Adapter, facts: Mapping[str, object]) -> list[str]:
    versions = facts.get("versions")
    found = versions.get(adapter.name) if isinstance(versions, dict) else None
    if found is None or re.fullmatch(adapter.known, str(found)):
        return []
    return [f"{adapter.name} {found} is another version than this adapter was made for; it was tried all the same"]


def manifest_in(client: DockerClient, image: str) -> tuple[ServerManifest, str]:
    """The manifest of an image, and its text. Raises `CacheRefused` where it has none."""
    from docker.errors import NotFound

    container = client.containers.create(image, ["true"], entrypoint=[])
    try:
        chunks, _ = container.get_archive(manifest.FILE)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as stream:
            source = stream.extractfile(stream.getmembers()[0])
            assert source is not None
            text = source.read().decode()
    except NotFound as error:
        raise CacheRefused(
            f"{image} was not warmed up by a server's start", hint=f"it has no {manifest.FILE}"
        ) from error
    finally:
        container.remove(force=True, v=True)
    return ServerManifest.read(text), text


def _hf_home(client: DockerClient, image: str, words: Words) -> str:
    given = words.environment.get(_ENV_HF_HOME)
    if given:
        return given
    environment = dict(line.partition("=")[::2] for line in client.images.get(image).attrs["Config"].get("Env") or ())
    return environment.get(_ENV_HF_HOME) or _HF_HOME
