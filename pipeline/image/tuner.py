"""The producer `tune`: FlashInfer's own AutoTuner on the ops of a plan, or caches that were tuned elsewhere."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import log
from pipeline.cache.integrity import check_root
from pipeline.cache.tree import Stored, sums
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import CacheRefused, Exit, PipelineError, UsageError, WarmUpError
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import (
    CACHE_FILE,
    CACHE_ROOT,
    ENV_CACHE_DIR,
    ENV_FILE,
    FAILURE_FILE,
    MANIFEST_FILE,
)
from pipeline.contract.plan import Plan
from pipeline.run import ProcessTimedOut

from . import modules
from .buildx import Build, build
from .caches import collect, copy_below, manifest_of
from .containers import ContainerTimeout
from .contexts import Staging, tree_digest, tuner_content
from .gpus import Gpus
from .modules import Modules
from .names import KEY, MODULES, PREFIX, TUNERS, gpu_of
from .producer import ROOT_FOLDER, CacheDir, Place, Proof, WarmUp
from .replay import Here, prove
from .runners import Form, Job, Unfinished, select
from .session import Session

# The tuner writes its own exit code into failure.json; a build step can only end with 0 or 1.
_CAUSES: dict[int, type[PipelineError]] = {
    int(Exit.USAGE): UsageError,
    int(Exit.WARM_UP): WarmUpError,
    int(Exit.CACHE): CacheRefused,
}


@dataclass(frozen=True)
class Recipe:
    """How images are built on a base: the Dockerfile, its named contexts (name to folder) and ARGs.

    `wheels` is one digest over the wheels, empty where the base brings its own software.
    """

    dockerfile: bytes
    contexts: Mapping[str, Path]
    arguments: Mapping[str, str]
    wheels: str = ""


@dataclass(frozen=True)
class TuneProducer:
    """Tunes a plan, or takes `imported` keys. `provenance` goes into each manifest that is tuned here.

    `base` is the id of the base image.
    """

    session: Session
    plan: Plan
    recipe: Recipe
    base: str
    gpus: Gpus
    here: Here
    options: tuple[str, ...] = ()
    tune_in: str = ""
    previous: Path | None = None
    imported: tuple[Stored, ...] = ()
    bake_jit: bool = True
    anew: bool = False  # do not resume
    provenance: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """`tune`."""
        return "tune"

    @property
    def model(self) -> str:
        """The plan's model."""
        return self.plan.model

    @property
    def device(self) -> str:
        """The plan's device."""
        return self.plan.device

    @property
    def ranks(self) -> int:
        """As many as the plan's layout needs."""
        return self.plan.layout.world

    @property
    def made_on(self) -> str:
        """Of imported keys, the GPU or the processor."""
        return gpu_of([manifest_of(one) for one in self.imported])

    def shown(self, entrypoint: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG002 - it stays
        """`env` shows the variables that name the cache."""
        return (), ("env",)

    def inputs(self) -> Mapping[str, object]:
        """The plan, the tuner's code and options; of imported keys their content."""
        compiled = self.bake_jit and self.plan.device == "cuda"
        if self.imported:
            return {"imported": {str(one.key): sums(one.path) for one in self.imported}, "modules": compiled}
        return {
            "plan": self.plan.to_json(),
            "code": tuner_content(),
            "options": list(self.options),
            "previous": tree_digest(self.previous),
            "modules": compiled,
        }

    @functools.cached_property
    def form(self) -> Form:
        """Where the ranks run."""
        return select(self.session, self.tune_in, device=self.plan.device, gpus=self.gpus)

    def build(self) -> str:
        """Build what the ranks need: the compiled modules and the tuner image. Return its id, empty in a build stage.

        A build stage finds the layers in BuildKit's cache: built here, no other run waits for them at the device lock.
        """
        self._modules()
        if self.imported:
            return ""
        with log.step("build the tuner image"):
            if self.form == "stage":
                build(self.session, replace(self._stage("tuner"), tag="", cache_only=True))
                return ""
            return self._image("tuner")

    def warm_up(self, place: Place) -> WarmUp:
        """Tune, check what came of it, and stamp the manifests with where they come from."""
        began = time.monotonic()
        root = place.scratch / ROOT_FOLDER
        if self.imported:
            manifests = [copy_below(one, root / CACHE_ROOT.lstrip("/")) for one in self.imported]
        else:
            ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
            with log.step(f"tune on {ranks}"):
                manifests = self._tune(place, root)
        compiled = self._modules()
        return _described(root, manifests, compiled, 0.0 if self.imported else time.monotonic() - began)

    def prove(self, image: str, place: Place) -> Proof:
        """Replay every op in fresh containers of the image."""
        return prove(place.client, image, self.here, level="replay", timeout=place.startup)

    def _tune(self, place: Place, root: Path) -> list[Manifest]:
        name = sha256_json([self.inputs(), self.base, self.recipe.wheels, self.gpus.facts(), dict(self.here.processor)])
        unfinished = Unfinished(self.session.home / "unfinished" / name, self.anew)
        previous = Staging(self.session.home).copy("previous", self.previous)
        job = Job(self.session, self._stage("tuned"), self.options, previous, unfinished, self.gpus, place.timeout)
        try:
            job.run(self.form, place.image, root)
        except (ProcessTimedOut, ContainerTimeout) as error:
            raise WarmUpError(
                f"the tuning timed out: {error.message}", details=error.details, log=str(place.log),
                hint="--tune-max-wait (TUNE_MAX_WAIT=) is the timeout in seconds; the same command again resumes",
            ) from error  # fmt: skip
        caches = root / CACHE_ROOT.lstrip("/")
        _raise_failure(caches / FAILURE_FILE, str(place.log))
        if not caches.is_dir() or not any(caches.iterdir()):
            raise WarmUpError(
                "the tuning produced neither cache nor error report", hint="see the log", log=str(place.log)
            )
        keys, _ = check_root(caches)
        others = {one.manifest.plan.digest for one in keys.keys if one.manifest is not None} - {self.plan.digest}
        try:
            manifests = [manifest_of(one) for one in collect([caches])]
        except CacheRefused as error:
            raise CacheRefused(
                f"the tuned cache is not sound: {error.message}", details=error.details, log=str(place.log),
                hint="nothing was baked; RETUNE=1 (--retune) tunes again",
            ) from error  # fmt: skip
        if others:
            raise CacheRefused("the cache was tuned for another plan", hint="an internal error", log=str(place.log))
        stamped = [self._stamp(caches, manifest) for manifest in manifests]
        unfinished.drop()
        return stamped

    def _stamp(self, caches: Path, manifest: Manifest) -> Manifest:
        """Say in a manifest where it comes from and which variables name it, once: when it is made."""
        more = {f"variable {name}": value for name, value in variables([manifest]).items()}
        stamped = replace(manifest, provenance={**(self.provenance or {}), **more})
        write_json(caches / manifest.key / MANIFEST_FILE, stamped.to_json())
        return stamped

    def _modules(self) -> Modules | None:
        """The compiled modules of the plan; None where it loads none."""
        if self.plan.device != "cuda" or not self.bake_jit:
            return None
        name = modules.digest(self.base, self.plan)
        found = modules.compile_modules(
            self.session, lambda: self._image("bare"), self.plan, self.gpus, name, timeout=7200.0
        )
        return found if found.names else None

    def _image(self, target: str) -> str:
        return build(self.session, self._stage(target)).image_id

    def _stage(self, target: str) -> Build:
        staging = Staging(self.session.home)
        plan = (json.dumps(self.plan.to_json(), indent=2) + "\n").encode()
        compiled = None if target == "bare" else self._modules()
        contexts = {
            **self.recipe.contexts,
            "tools": staging.tuner({"plan.json": plan}),
            "modules": staging.copy("modules", compiled.root if compiled else None),
            "previous": staging.copy("previous", self.previous),
        }
        tag = "" if target == "tuned" else f"{TUNERS}:{sha256_json([target, self.base, self.inputs()])[:16]}"
        return Build(self.recipe.dockerfile, target, contexts, self.recipe.arguments, tag=tag)


def variables(manifests: list[Manifest]) -> dict[str, str]:
    """The static environment by which a reader finds these keys; the file itself only where there is one key."""
    found = {ENV_CACHE_DIR: CACHE_ROOT}
    if len(manifests) == 1:
        found[ENV_FILE] = f"{CACHE_ROOT}/{manifests[0].key}/{CACHE_FILE}"
    return found


def _described(root: Path, manifests: list[Manifest], compiled: Modules | None, seconds: float) -> WarmUp:
    """A warm-up of keys below `root`, with compiled modules copied beside them."""
    caches = []
    if compiled is not None:
        shutil.copytree(compiled.root, root, dirs_exist_ok=True)
        caches.append(CacheDir("flashinfer-modules", compiled.directory, _size(root / compiled.directory.lstrip("/"))))
    for manifest in manifests:
        path = f"{CACHE_ROOT}/{manifest.key}"
        caches.append(CacheDir("flashinfer-autotune", path, _size(root / path.lstrip("/"))))
    for folder, _, _ in os.walk(root):
        Path(folder).chmod(0o755)
    return WarmUp(
        root=root,
        caches=tuple(caches),
        environment=variables(manifests),
        manifests=tuple(f"{CACHE_ROOT}/{manifest.key}/{MANIFEST_FILE}" for manifest in manifests),
        seconds=seconds,
        labels=key_labels(manifests, root, compiled),
    )


def key_labels(manifests: list[Manifest], root: Path, compiled: Modules | None = None) -> dict[str, str]:
    """The labels that say which keys an image has: for each its path, plan digest and manifest digest, by commas."""
    from pipeline.contract.digest import sha256_file

    files = [root / CACHE_ROOT.lstrip("/") / manifest.key / MANIFEST_FILE for manifest in manifests]
    found = {
        KEY: ",".join(manifest.key for manifest in manifests),
        f"{PREFIX}.plan": ",".join(manifest.plan.digest for manifest in manifests),
        f"{PREFIX}.manifest": ",".join(sha256_file(file) for file in files),
        f"{PREFIX}.flashinfer": manifests[0].plan.flashinfer_version,
        f"{PREFIX}.arch": ",".join(dict.fromkeys(manifest.record.arch for manifest in manifests)),
    }
    return {**found, MODULES: ",".join(compiled.names)} if compiled is not None else found


def _size(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def _raise_failure(path: Path, log_path: str) -> None:
    """Raise what the tuner wrote into failure.json; nothing where there is none."""
    if not path.is_file():
        return
    value = json.loads(path.read_text(encoding="utf-8"))
    details = list(value.get("details", ()))
    for rank in value.get("ranks", ()):
        details.append(f"rank {rank.get('rank')}: last step {rank.get('step', 'unknown')}")
        details += [f"    {line}" for line in str(rank.get("stack", "")).splitlines()[:12]]
    raise _CAUSES.get(int(value.get("exit_code", Exit.WARM_UP)), WarmUpError)(
        str(value.get("message", "tuning failed")), details=details[-40:], hint=str(value.get("hint", "")), log=log_path
    )
