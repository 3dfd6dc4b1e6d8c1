"""The producer `tune`: FlashInfer's own AutoTuner on the ops of a plan, or caches that were tuned elsewhere.

The ranks run in one container of the tuner image, with the engine's GPUs where the plan is for one. They leave
`failure.json` instead of a cache when they fail. What an interrupted tuning had finished lies in the cache home below
`unfinished`, by a digest of what is tuned, one file an op, copied out while the ranks run; the ranks check these files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.cache.integrity import collect, manifest_of
from pipeline.cache.tree import Stored, sums
from pipeline.contract.digest import sha256_file, sha256_json
from pipeline.contract.errors import CacheRefused, Exit, PipelineError, UsageError, WarmUpError
from pipeline.contract.files import scratch, write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import (
    CACHE_FILE,
    CACHE_ROOT,
    ENV_CACHE_DIR,
    ENV_FILE,
    ENV_WORKSPACE,
    FAILURE_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    STATE_ROOT,
    TUNER_ROOT,
)
from pipeline.contract.plan import Plan

from . import modules
from .buildx import Build, Recipe, build
from .containers import ContainerSpec, ContainerTimeout, created, follow, tar_of, tuner_command
from .contexts import Staging, tree_digest, tuner_content
from .gpus import NO_GPUS, Gpus
from .modules import WORKSPACE, Modules
from .names import KEY, MODULES, PREFIX, TUNERS, gpu_of
from .producer import ROOT_FOLDER, CacheDir, Job, Proof, WarmUp
from .replay import Here, prove
from .session import Session

if TYPE_CHECKING:
    from docker.models.containers import Container

_OP = re.compile(r"\s*(\d+)/(\d+) ")  # the tuner begins op k of n
_PREVIOUS, _OUT = "/previous", "/out"
_EVERY = 2.0  # seconds between two copies of finished ops at least

# The exit code that the tuner writes into failure.json.
_CAUSES: dict[int, type[PipelineError]] = {
    int(Exit.USAGE): UsageError,
    int(Exit.WARM_UP): WarmUpError,
    int(Exit.CACHE): CacheRefused,
}


@dataclass(frozen=True)
class TuneProducer:
    """Tunes a plan, or takes `imported` keys. `provenance` goes into each manifest that is tuned here.

    `base` is the id of the base image.
    """

    session: Session
    plan: Plan
    recipe: Recipe
    base: str
    here: Here
    options: tuple[str, ...] = ()
    previous: Path | None = None
    imported: tuple[Stored, ...] = ()
    bake_jit: bool = True
    retune: bool = False  # resume nothing
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
    def gpus(self) -> Gpus:
        """Those that the ranks get; none for a CPU plan."""
        return self.here.gpus if self.plan.device == "cuda" else NO_GPUS

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
    def compiled(self) -> Modules | None:
        """The compiled modules of the plan; None where it loads none. The first access builds an image and compiles."""
        if self.plan.device != "cuda" or not self.bake_jit:
            return None
        name = modules.digest(self.base, self.plan)
        found = modules.compile_modules(
            self.session, lambda: self._image("bare", None), self.plan, self.gpus, name, timeout=7200.0
        )
        return found if found.names else None

    def build(self) -> str:
        """Build what the ranks need: the compiled modules and the tuner image, whose id is returned.

        Imported keys need no ranks: then the id is empty.
        """
        compiled = self.compiled
        if self.imported:
            return ""
        with log.step("build the tuner image"):
            return self._image("tuner", compiled)

    def warm_up(self, job: Job) -> WarmUp:
        """Tune, check what came of it, and stamp the manifests with where they come from."""
        began = time.monotonic()
        root = job.scratch / ROOT_FOLDER
        if self.imported:
            for one in self.imported:
                shutil.copytree(one.path, root / CACHE_ROOT.lstrip("/") / str(one.key))
            manifests = [manifest_of(one) for one in self.imported]
        else:
            ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
            with log.step(f"tune on {ranks}"):
                manifests = self._tune(job, root)
        return _described(root, manifests, self.compiled, 0.0 if self.imported else time.monotonic() - began)

    def prove(self, image: str, job: Job) -> Proof:
        """Replay every op in fresh containers of the image."""
        return prove(job.client, image, self.here, level="replay", timeout=job.startup)

    def _tune(self, job: Job, root: Path) -> list[Manifest]:
        name = sha256_json([self.inputs(), self.base, self.recipe.wheels, self.gpus.facts(), dict(self.here.processor)])
        unfinished = self.session.home / "unfinished" / name
        if self.retune:
            shutil.rmtree(unfinished, ignore_errors=True)
        caches = root / CACHE_ROOT.lstrip("/")
        try:
            self._run_ranks(job, unfinished, caches)
        except ContainerTimeout as error:
            raise WarmUpError(
                f"the tuning timed out: {error.message}", details=error.details, log=str(job.log),
                hint="--tune-max-wait (TUNE_MAX_WAIT=) is the timeout in seconds; the same command again resumes",
            ) from error  # fmt: skip
        _raise_failure(caches / FAILURE_FILE, str(job.log))
        if not caches.is_dir() or not any(caches.iterdir()):
            raise WarmUpError(
                "the tuning produced neither cache nor error report", hint="see the log", log=str(job.log)
            )
        try:
            manifests = [manifest_of(one) for one in collect([caches])]
        except CacheRefused as error:
            raise CacheRefused(
                f"the tuned cache is not sound: {error.message}", details=error.details, log=str(job.log),
                hint="nothing was baked; RETUNE=1 (--retune) tunes again",
            ) from error  # fmt: skip
        assert {one.plan.digest for one in manifests} == {self.plan.digest}, "the ranks tuned another plan"
        stamped = [self._stamp(caches, manifest) for manifest in manifests]
        shutil.rmtree(unfinished, ignore_errors=True)
        return stamped

    def _run_ranks(self, job: Job, unfinished: Path, caches: Path) -> None:
        """Run the ranks and copy out what they leave: into `caches` at the end, into `unfinished` all the while."""
        words = tuner_command(
            "pipeline.tune", f"{TUNER_ROOT}/{PLAN_FILE}", _OUT, "--keep-failure", "--state", STATE_ROOT
        )
        unfinished.mkdir(parents=True, exist_ok=True)
        folders = {STATE_ROOT.lstrip("/"): unfinished}
        if self.previous is not None:
            words += ["--previous", _PREVIOUS]
            folders[_PREVIOUS.lstrip("/")] = self.previous
        spec = ContainerSpec(user="0:0", environment={ENV_WORKSPACE: WORKSPACE}, gpus=self.gpus)
        with created(job.client, job.image, [*words, *self.options], spec) as container:
            container.put_archive("/", tar_of(folders))
            last = time.monotonic()

            def heard(line: str) -> None:
                nonlocal last
                with contextlib.suppress(OSError), job.log.open("a", encoding="utf-8") as said:  # a full disk
                    said.write(line + "\n")
                _repeat(line)
                if time.monotonic() - last >= _EVERY:
                    _copy_state(container, unfinished)
                    last = time.monotonic()

            try:
                status = follow(container, "tuning", timeout=job.timeout, on_line=heard)
            finally:
                _copy_state(container, unfinished)
                kept = len(list(unfinished.glob("*.json")))
                if kept:
                    log.note(f"{kept} finished pieces of the tuning are kept: the same command resumes from them")
            if status != 0:
                raise WarmUpError(
                    f"the tuning container ended with {status}: {_meaning(status)}",
                    details=container.logs(tail=10).decode(errors="replace").splitlines(),
                    hint="run the same command again: it resumes",
                    log=str(job.log),
                )
            chunks, _ = container.get_archive(_OUT)
            safe_extract(chunks, caches, strip=1)

    def _stamp(self, caches: Path, manifest: Manifest) -> Manifest:
        """Say in a manifest where it comes from and which variables name it, once: when it is made."""
        more = {f"variable {name}": value for name, value in variables([manifest]).items()}
        stamped = replace(manifest, provenance={**(self.provenance or {}), **more})
        write_json(caches / manifest.key / MANIFEST_FILE, stamped.to_json())
        return stamped

    def _image(self, target: str, compiled: Modules | None) -> str:
        staging = Staging(self.session.home)
        plan = (json.dumps(self.plan.to_json(), indent=2) + "\n").encode()
        contexts = {
            **self.recipe.contexts,
            "tools": staging.tuner({PLAN_FILE: plan}),
            "modules": compiled.root if compiled else staging.empty(),
        }
        tag = f"{TUNERS}:{sha256_json([target, self.base, self.inputs()])[:16]}"
        wanted = Build(self.recipe.dockerfile, target, contexts, self.recipe.arguments, tag=tag)
        return build(self.session, wanted).image_id


def _repeat(line: str) -> None:
    """Repeat a line of the ranks; the tuner's own result, which the manifest holds in full, is left out."""
    plain = line.rstrip()
    if plain and not plain.startswith("{"):
        log.note(f"│ {plain}")
        op = _OP.match(plain)
        log.progress(plain[op.end() :] if op else plain.strip(), *((int(op[1]) - 1, int(op[2])) if op else ()))


def _copy_state(container: Container, unfinished: Path) -> None:
    """Copy what a container finished, running or ended; what cannot be had is left."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    with contextlib.suppress(DockerException, RequestException, PipelineError, OSError):
        chunks, _ = container.get_archive(STATE_ROOT)
        with scratch(unfinished.parent, ".copying-") as work:
            safe_extract(chunks, work / "state", strip=1)
            (work / "state").mkdir(exist_ok=True)
            if unfinished.exists():
                unfinished.rename(work / "old")
            (work / "state").rename(unfinished)


def _meaning(status: int) -> str:
    """What an exit status of a container says; above 128 a signal ended its first process."""
    try:
        return f"ended by {signal.Signals(status - 128).name}"
    except ValueError:
        return "it gave no reason"


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
