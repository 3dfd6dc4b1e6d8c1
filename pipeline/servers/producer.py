"""A server's own start as a producer of caches: warm up in a container of its image, prove in fresh ones.

cold start → warm starts until one writes nothing new → caches by kind → baked image → starts as others would make them
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.digest import sha256_file, sha256_json
from pipeline.contract.errors import CacheRefused, UsageError, WarmUpError
from pipeline.contract.files import write_json
from pipeline.image.producer import ROOT_FOLDER, WARMUP_FILE, CacheDir, Job, Proof, WarmUp, read_entry

from . import collect, judge, kinds, manifest
from .adapters import FACTS, Adapter, adapter_of
from .containers import How, Watched, manifest_in, watch
from .judge import Summary
from .manifest import Served, ServerManifest
from .model import laid
from .starts import Spec, Start
from .watch import Order
from .words import Words

if TYPE_CHECKING:
    from docker import DockerClient

MOST = 3  # one cold start and two warm ones
RULES = 2  # raise it when the same words would leave other files
_ENV_HF_HOME = "HF_HOME"
# Who starts the finished image: a Kubernetes pod with its own command, user and a read-only root; and root itself.
PROOFS = (How(user="12345:12345", read_only=True), How(user="0:0"))


@dataclass(frozen=True)
class ServerProducer:
    """`sets` are the words of each set of arguments, which share server and variables; `files` are the model's config
    files by name, `device` is cpu or cuda. `entry` is a folder of `warm_up_in_place`, to take in place of starting.
    """

    sets: tuple[Words, ...]
    files: Mapping[str, str]
    model: str
    device: str
    entry: Path | None = None

    @property
    def words(self) -> Words:
        """The first set's."""
        return self.sets[0]

    @property
    def name(self) -> str:
        """The server's."""
        return self.words.server

    @property
    def ranks(self) -> int:
        """As its words say."""
        return max(words.ranks for words in self.sets)

    @property
    def made_on(self) -> str:
        """Of an entry, the GPU."""
        device = manifest_of(self.entry).device if self.entry is not None else ""
        return "" if device == "cpu" else device.removeprefix("NVIDIA ")

    @property
    def adapter(self) -> Adapter:
        """What is known of the server."""
        return adapter_of(self.name)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values that must appear nowhere."""
        return tuple(sorted({value for words in self.sets for value in words.secret_values()}))

    def shown(self, entrypoint: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The model's folder, mounted, and the words that were baked; its serve command if the entrypoint lacks it."""
        mount = ("-v", f"/your/model:{self.words.model}:ro") if self.words.model.startswith("/") else ()
        serves = any(self.name in word for word in entrypoint)
        return mount, (*(() if serves else self.adapter.serve), *self.words.recorded())

    def inputs(self) -> Mapping[str, object]:
        """Words without values of secrets, and the model's config."""
        return {
            "server": self.name,
            "arguments": [list(words.recorded()) for words in self.sets],
            "environment": dict(self.words.environment),
            "secrets": sorted(self.words.secrets),
            "model": dict(self.files),
            "placed": self.adapter.environment(),
            "rules": RULES,
            **({"entry": sha256_file(self.entry / WARMUP_FILE)} if self.entry is not None else {}),
        }

    def environment(self) -> dict[str, str]:
        """The static ENV of the image. Raises `UsageError` where a word would place a cache elsewhere."""
        placed = self.adapter.environment()
        clash = sorted(name for name, value in self.words.environment.items() if placed.get(name, value) != value)
        if clash:
            raise UsageError(
                f"SERVER_ENV sets {clash[0]}, which places a cache that is baked below {kinds.ROOT}",
                hint="leave it out",
            )
        return {**placed, **self.words.environment}

    def spec(self, words: Words, *, ready: float, most: int) -> Spec:
        """What is started, and asked. `ready` is the timeout of one start in seconds."""
        return Spec(
            command=self.adapter.command(words),
            environment={**self.environment(), **words.secrets},
            requests=self.adapter.requests(words),
            token=self.adapter.token(words),
            ready=ready,
            most=most,
        )

    def order(self, *, ready: float) -> Order:
        """The starts that warm up; `ready` is the timeout of each in seconds."""
        return Order(tuple(self.spec(words, ready=ready, most=MOST) for words in self.sets), FACTS)

    def laid(self, home: str) -> tuple[dict[str, str], ...]:
        """Of each set, absolute path → text of the model's files; `home` is HF_HOME. Raises `UsageError`."""
        return tuple(laid(words, self.files, home) for words in self.sets)

    def build(self) -> str:
        """Nothing: the server starts in the base."""
        return ""

    def warm_up(self, job: Job) -> WarmUp:
        """Start until a start writes nothing new. Raises `WarmUpError`, `UsageError` or `CacheRefused`."""
        if self.entry is not None:
            shutil.copytree(self.entry / ROOT_FOLDER, job.scratch / ROOT_FOLDER)
            return replace(read_entry(self.entry), root=job.scratch / ROOT_FOLDER)
        began = time.monotonic()
        placed = self.laid(_hf_home(job.client, job.image, self.words))
        order = self.order(ready=job.timeout / MOST / len(self.sets))
        with room_for_caches(), log.step(f"start {self.name} up to {MOST * len(self.sets)} times"):
            watched = watch(
                job.client, job.image, order, {path: text for one in placed for path, text in one.items()},
                How(user="0:0", gpus=job.gpus), out=job.scratch / "watched", logfile=job.log,
            )  # fmt: skip
            warm = self.described(watched, job.scratch / ROOT_FOLDER, placed, str(job.log))
        return replace(warm, seconds=time.monotonic() - began)

    def prove(self, image: str, job: Job) -> Proof:
        """Start the finished image as others would: no network, another command, another user, a read-only root."""
        told, text = manifest_in(job.client, image)
        if told.device != "cpu" and told.device not in {gpu.name for gpu in job.gpus.gpus}:
            return self.proof(told, text, {})
        starts: dict[str, tuple[Served, Start]] = {}
        for at, (words, served) in enumerate(zip(self.sets, told.sets, strict=True)):
            for how in PROOFS:
                who = f"{how}{_which(self.sets, at)}"
                with log.step(f"start {self.name} in the finished image {who}"):
                    watched = watch(
                        job.client, image, Order((self.spec(words, ready=job.startup, most=1),)), served.model,
                        replace(how, gpus=job.gpus), out=job.scratch / f"proof-{at}-{how.user}", logfile=job.log,
                    )  # fmt: skip
                starts[who] = (served, watched.starts[0][-1])
        return self.proof(told, text, starts)

    def proof(self, told: ServerManifest, text: str, starts: Mapping[str, tuple[Served, Start]]) -> Proof:
        """What fresh starts of the finished image show, by who started it; without one nothing but its manifest."""
        digest, baked = sha256_json(text), sorted(told.caches)
        keys = (f"{told.server}/{digest[:16]}",)
        if not starts:
            return Proof("static", {"manifests": 1}, keys=keys, manifests=(digest,), device=told.device)
        found: list[str] = []
        seconds: dict[str, Mapping[str, float]] = {}
        for who, (served, start) in starts.items():
            found += [f"{who}: {one}" for one in judge.findings(baked, served.warm, start, self.adapter)]
            if start.outcome == "ready":
                now, warm, cold = Summary.of(self.adapter, start), served.warm, served.cold
                seconds[who] = {**now.seconds, "ready": now.ready}
                beside = (
                    f"warm {warm.ready:.1f} s, ratio {now.ready / max(warm.ready, 0.1):.2f}; cold {cold.ready:.1f} s"
                )
                log.note(f"{who}: ready after {now.ready:.1f} s ({beside})")
                for one in judge.by_kind(baked, warm, now):
                    log.note(str(one))
        checks = {"starts": len(starts), "kinds": len(baked)}
        return Proof("replay", checks, tuple(found), keys, () if found else keys, (digest,), told.device, seconds)

    def described(self, watched: Watched, root: Path, placed: Sequence[Mapping[str, str]], logfile: str = "") -> WarmUp:
        """Lay out below `root` what starts left that all ended well, and describe it.

        Raises `WarmUpError` where a start failed, the server's own words first, or `CacheRefused`.
        """
        self._check(watched.starts, logfile)
        if watched.pack is None:
            raise CacheRefused(f"{self.name} left no caches", details=watched.starts[-1][-1].tail())
        places = collect.lay(watched.pack, root, self.secrets)
        watched.pack.unlink()
        files, others = collect.written(start for some in watched.starts for start in some)
        told = self._manifest(watched, placed, places, others)
        for note in told.notes:
            log.warn(note)
        if others:
            size = sum(others.values())
            log.note(f"{len(others)} files of no known kind are not baked ({size / 1e6:.1f} MB): see the manifest")
        for line in told.table():
            log.note(line)
        file = root / manifest.FILE.lstrip("/")
        write_json(file, told.to_json())
        collect.search(file.parent, self.secrets)
        places[kinds.MANIFEST, kinds.PLACE] = file.stat().st_size
        site = str(watched.facts.get("site") or "")
        if site:
            size = collect.install(root, site, places, files)
            if (kinds.BYTECODE, site) not in places:
                places[kinds.AT_START, site] = size
        caches = tuple(
            CacheDir(kind, path, size, writable=path.startswith(kinds.ROOT))
            for (kind, path), size in sorted(places.items())
        )
        version = told.versions.get(self.name) or told.versions.get(f"{self.name}-cpu", "")
        return WarmUp(
            root=root,
            caches=caches,
            environment=told.environment,
            manifests=(manifest.FILE,),
            labels={"pipeline.server": f"{self.name} {version}".strip(), "pipeline.server.device": told.device},
        )

    def _manifest(
        self,
        watched: Watched,
        placed: Sequence[Mapping[str, str]],
        places: collect.Places,
        others: Mapping[str, int],
    ) -> ServerManifest:
        sizes: Counter[str] = Counter()
        for (kind, _), size in places.items():
            sizes[kind] += size
        return ServerManifest(
            server=self.name,
            environment=self.environment(),
            secrets=tuple(sorted(self.words.secrets)),
            versions=watched.facts.get("versions", {}),
            hashed=tuple(watched.facts.get("hashed", ())),
            device=str(watched.facts.get("gpu") or "cpu"),
            sets=tuple(
                Served(words.recorded(), model, *(Summary.of(self.adapter, some[at]) for at in (0, -1)))
                for words, model, some in zip(self.sets, placed, watched.starts, strict=True)
            ),
            caches=dict(sizes),
            not_baked=dict(sorted(others.items())[:200]),
            notes=(*watched.notes, *_growing(watched.starts), *self._version(watched.facts)),
        )

    def _check(self, starts: Sequence[Sequence[Start]], logfile: str) -> None:
        last = starts[-1][-1]
        if last.outcome == "ready":
            return
        said = judge.last_words(last) if last.outcome == "timeout" else judge.why(last.tail(400))
        which = _which(self.sets, len(starts) - 1)
        raise WarmUpError(
            f"{self.name}, start {len(starts[-1])}{which}: {last.message}" + (f": {said}" if said else ""),
            details=last.tail(30),
            hint="its last lines are above, all of them in the log; the same arguments must start in this image",
            log=logfile,
        )

    def _version(self, facts: Mapping[str, object]) -> list[str]:
        versions = facts.get("versions")
        found = versions.get(self.name) if isinstance(versions, dict) else None
        if found is None or re.fullmatch(self.adapter.known, str(found)):
            return []
        return [f"{self.name} {found} is another version than this adapter was made for; it was started anyway"]


@contextlib.contextmanager
def room_for_caches() -> Iterator[None]:
    """Raise `WarmUpError` where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WarmUpError(
            f"the caches cannot be kept: {error.strerror}: {error.filename or 'this disk'}",
            hint="nothing was baked; make room, or let XDG_CACHE_HOME name another disk",
        ) from error


def manifest_of(entry: Path) -> ServerManifest:
    """The manifest of a folder of `warm_up_in_place`. Raises `CacheRefused`."""
    try:
        return ServerManifest.read((entry / ROOT_FOLDER / manifest.FILE.lstrip("/")).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CacheRefused(
            f"{entry} is no warm-up of a server: {error}", hint="CACHE= takes what `pipeline warm-up --in-place` wrote"
        ) from error


def from_manifest(told: ServerManifest) -> ServerProducer:
    """The producer that proves an image which exists: its words are in the manifest, but for secrets."""
    sets = tuple(Words(told.server, one.arguments, told.environment) for one in told.sets)
    return ServerProducer(sets, {}, told.server, "cpu" if told.device == "cpu" else "cuda")


def _which(sets: Sequence[Words], at: int) -> str:
    """Which set is meant, where there are several."""
    return f", set {at + 1} of {len(sets)}" if len(sets) > 1 else ""


def _growing(starts: Sequence[Sequence[Start]]) -> list[str]:
    """The kinds that still got new files in the last start of all."""
    return [
        f"{kind} grows with every start: {count} new files in start {MOST}; it will in the image too"
        for some in starts
        if len(some) == MOST
        for kind, count in sorted(kinds.count(some[-1].new).items())
    ]


def _hf_home(client: DockerClient, image: str, words: Words) -> str:
    lines = client.images.get(image).attrs["Config"].get("Env") or ()
    environment = {**dict(line.partition("=")[::2] for line in lines), **words.environment}
    return str(environment.get(_ENV_HF_HOME, ""))
