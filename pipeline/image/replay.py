"""Proving FlashInfer's caches in a finished image: files, modules, and a replay of every op in fresh ranks.

The tuner is no part of the finished image. Containers that replay get it as a mounted folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.cache.archive import chunked, safe_extract
from pipeline.cache.integrity import check_root
from pipeline.cache.tree import Stored
from pipeline.contract.digest import sha256_file
from pipeline.contract.manifest import Manifest, Module
from pipeline.contract.places import CACHE_ROOT, ENV_CACHE_DIR, ENV_WORKSPACE, MANIFEST_FILE, TUNER_ROOT
from pipeline.contract.text import shown
from pipeline.contract.verdict import Level

from .containers import ANYBODY, ContainerSpec, Ended, created, run_all, run_one, tar_of, tuner_command
from .contexts import tuner_into
from .gpus import Gpus
from .modules import WORKSPACE
from .names import KEY, MODULES
from .producer import Proof

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

_BLOCK = 1 << 20
_UNKNOWN = "unknown"
_NO_MEMORY = "out of memory"

# Who replays, and where it may write. The workspace is the one place that FlashInfer must be able to write to.
USERS: Mapping[str, ContainerSpec] = {
    "root": ContainerSpec(user="0:0", environment={ENV_WORKSPACE: WORKSPACE}),
    "another user": ContainerSpec(user=ANYBODY, environment={ENV_WORKSPACE: WORKSPACE}),
    "read-only root": ContainerSpec(user=ANYBODY, read_only=True, environment={ENV_WORKSPACE: WORKSPACE}),
}


@dataclass(frozen=True)
class Here:
    """What is here to replay on: the GPUs of the engine, its processor (model, flags) and machine as uname says it."""

    gpus: Gpus
    processor: Mapping[str, Any]
    machine: str

    def has(self, manifest: Manifest) -> bool:
        """Whether the device is here that a key was tuned on."""
        if manifest.key.split("/")[1].startswith("cpu-"):
            cpu = manifest.record.host.cpu
            same = all(cpu.get(name, "") == str(self.processor.get(name, "")) for name in ("model", "flags"))
            return same and manifest.record.arch == f"cpu-{self.machine}"
        wanted, found = manifest.record.host.gpus, [gpu.name for gpu in self.gpus.gpus]
        return len(found) >= len(wanted) and set(wanted) <= set(found)


@functools.cache
def tuner_archive() -> bytes:
    """The tuner's launcher and package as a tar stream."""
    with tempfile.TemporaryDirectory(prefix="tuner-") as temporary:
        tuner_into(Path(temporary))
        return tar_of({".": Path(temporary)})


def tuner_files() -> dict[str, bytes]:
    """What `ContainerSpec.files` mounts for `tuner_command`."""
    return {TUNER_ROOT: tuner_archive()}


def device_name(manifest: Manifest) -> str:
    """The GPU's or processor's name that a key was tuned on."""
    host = manifest.record.host
    return ", ".join(dict.fromkeys(host.gpus)) if host.gpus else str(host.cpu.get("model", "unknown"))


@dataclass
class _Sheet:
    """What was looked at so far, and what is wrong."""

    checks: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def count(self, name: str, number: int) -> None:
        self.checks[name] = self.checks.get(name, 0) + number


def read_keys(client: DockerClient, image: str, root: Path) -> tuple[tuple[Stored, ...], list[str]]:
    """Copy the cache root out of an image to `root`; return its keys, and what is wrong with them."""
    from docker.errors import NotFound

    place = cache_root_of(client, image)
    with created(client, image, ["true"], ContainerSpec()) as container:
        try:
            chunks, _ = container.get_archive(place)
        except NotFound:
            return (), [f"{place}: the image has no tuned cache"]
        safe_extract(chunks, root, strip=1)
    tree, findings = check_root(root)
    return tree.keys, [str(finding) for finding in findings]


def cache_root_of(client: DockerClient, image: str) -> str:
    """Where an image keeps FlashInfer's caches: what its environment says, else the default."""
    environment = client.images.get(image).attrs.get("Config", {}).get("Env") or ()
    return dict(line.partition("=")[::2] for line in environment).get(ENV_CACHE_DIR) or CACHE_ROOT


def prove(client: DockerClient, image: str, here: Here, *, level: Level, timeout: float) -> Proof:
    """Check every key of an image, and replay those whose device is here, all within `timeout` seconds."""
    sheet = _Sheet()
    with tempfile.TemporaryDirectory(prefix="verify-") as temporary:
        keys, findings = read_keys(client, image, Path(temporary) / "root")
        found = [(one.manifest, sha256_file(one.path / MANIFEST_FILE)) for one in keys if one.manifest is not None]
    sheet.findings += findings
    labels = client.images.get(image).labels
    lost = set(filter(None, labels.get(KEY, "").split(","))) - {str(one.key) for one in keys}
    sheet.findings += [f"the key {key} is in the image's label, and not in the image" for key in sorted(lost)]
    sheet.count("keys", len(keys))
    manifests = [manifest for manifest, _ in found]
    sheet.count("covered", sum(len(manifest.covered) for manifest in manifests))
    named = str(labels.get(MODULES, ""))
    modules = [name for name in named.split(",") if name]
    sheet.findings += _module_findings(client, image, manifests, modules)
    sheet.count("modules", len(modules))
    replayed = []
    if not sheet.findings:
        absent = [one for one in manifests if level == "static" or not here.has(one)]
        if absent:
            with log.step("compare versions and libraries with those of the tuning"):
                sheet.findings += _image_half_findings(client, image, absent, timeout=timeout)
        until = time.monotonic() + timeout
        for manifest in manifests:
            if manifest not in absent:
                left = max(1.0, until - time.monotonic())
                _replay(client, image, manifest, sheet, here, compiled=bool(modules), timeout=left)
                replayed.append(manifest.key)
            elif level != "static":
                log.warn(f"NOT REPLAYED: no {device_name(manifest)} here ({manifest.key})")
    complete = bool(replayed) and len(replayed) == len(manifests)
    return Proof(
        level="replay" if complete else "static",
        checks=sheet.checks,
        findings=tuple(sheet.findings),
        keys=tuple(manifest.key for manifest in manifests),
        proven=tuple(replayed),
        manifests=tuple(sha for _, sha in found),
        device=", ".join(dict.fromkeys(device_name(manifest) for manifest in manifests)),
    )


def _replay(
    client: DockerClient, image: str, manifest: Manifest, sheet: _Sheet, here: Here, *, compiled: bool, timeout: float
) -> None:
    """Replay one key as every user at the same time: nothing is measured, so that they do not disturb each other."""
    until = time.monotonic() + timeout
    command = tuner_command("pipeline.tune.replay", "--key", manifest.key)
    more = {"FLASHINFER_DISABLE_JIT": "1"} if compiled else {}  # every module must load as baked: no compiler may run
    specs = {
        who: replace(one, gpus=here.gpus, environment={**one.environment, **more}, files=tuner_files())
        for who, one in USERS.items()
    }
    ranks = f"{len(manifest.ranks)} rank{'s' if len(manifest.ranks) > 1 else ''}"
    with log.step(f"replay on {ranks} {', '.join(f'as {who}' for who in specs)}"):
        together = run_all(client, image, command, list(specs.values()), timeout=timeout)
        for (who, spec), first in zip(specs.items(), together, strict=True):
            ended = first
            if first.status != 0 and _NO_MEMORY in f"{first.stdout}{first.stderr}".lower():  # it may fit alone
                ended = run_one(client, image, command, spec, timeout=max(1.0, until - time.monotonic()))
            _note(who, ended, sheet)


def _note(who: str, ended: Ended, sheet: _Sheet) -> None:
    """Put the result of one replay onto the sheet."""
    try:
        found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        sheet.findings.append(
            f"as {who}: the replay ended with {ended.status} and no result: {' / '.join(ended.stderr[-3:])}"
        )
        return
    calls, hits = int(found.get("calls", 0)), int(found.get("hits", 0))
    sheet.count("replayed calls", calls)
    sheet.count("hits", hits)
    if found.get("other_calls"):
        sheet.count("calls as others ask", int(found["other_calls"]))
        sheet.count("hits as others ask", int(found["other_hits"]))
    said = [*found.get("misses", ()), *found.get("wrong", ()), *found.get("record_differences", ())]
    sheet.findings += [f"as {who}: {item if isinstance(item, str) else json.dumps(item)}" for item in said]
    if calls == 0:
        sheet.findings.append(f"as {who}: the replay called nothing")
    if ended.status != 0 and not said:
        sheet.findings.append(f"as {who}: the replay ended with {ended.status}: {' / '.join(ended.stderr[-3:])}")


def _image_half_findings(
    client: DockerClient, image: str, manifests: Sequence[Manifest], *, timeout: float
) -> Iterator[str]:
    """What decides a record and differs in a container of `image` from when it was tuned: versions, libraries.

    For keys that are not replayed: a replay compares the whole record. No GPU is given, so that what only a GPU says
    (cuDNN's version) is not compared, and that is said.
    """
    spec = ContainerSpec(user="0:0", environment={ENV_WORKSPACE: WORKSPACE}, files=tuner_files())
    ended = run_one(client, image, tuner_command("pipeline.tune.record", "--image-half"), spec, timeout=timeout)
    try:
        found = json.loads(ended.stdout.strip().splitlines()[-1])
        here, libraries = dict(found["image_half"]), dict(found["libraries"])
    except (ValueError, LookupError, TypeError):
        yield f"the image's versions and libraries cannot be read ({ended.status}): {' / '.join(ended.stderr[-3:])}"
        return
    for manifest in manifests:
        yield from differing(manifest, here, libraries)


def differing(manifest: Manifest, here: Mapping[str, str], libraries: Mapping[str, str]) -> Iterator[str]:
    """Fields and, where one differs, library paths that are not what the manifest's record says."""
    tuned, before = manifest.record.image_half(), manifest.record.libraries
    unknown = [name for name, value in tuned.items() if here.get(name, _UNKNOWN) == _UNKNOWN != value]
    if unknown:
        log.note(f"not compared without a GPU: {', '.join(sorted(unknown))} ({manifest.key})")
    wrong = [name for name in tuned if name not in unknown and here.get(name) != tuned[name]]
    for name in wrong:
        yield f"{name} is {shown(here.get(name), 60)} in this image, it was {shown(tuned[name], 60)} when tuned"
    if wrong:
        for name, path in sorted(before.items()):
            if libraries.get(name, path) != path:
                yield f"the loader finds {shown(libraries[name])} in this image, it found {shown(path)} when tuned"
        for name in sorted(set(libraries) - set(before)):
            yield f"the loader finds {shown(libraries[name])} in this image, and found no {shown(name)} when tuned"


def _module_findings(
    client: DockerClient, image: str, manifests: Sequence[Manifest], baked: Sequence[str]
) -> Iterator[str]:
    """Findings on the modules that the image's label names: each must lie there with a manifest's size and sha256.

    A manifest may list more: modules that came compiled with FlashInfer, or that were left out with BAKE_JIT=0.
    """
    listed = [module for manifest in manifests for module in manifest.modules if module.name in baked and module.path]
    for name in sorted(set(baked) - {module.name for module in listed}):
        yield f"the module {name} is in the image, and in no manifest"
    if not listed:
        return
    with created(client, image, ["true"], ContainerSpec()) as container:
        for module in dict.fromkeys(listed):
            wrong = _wrong_module(container, module)
            if wrong:
                yield f"the module {module.name} {wrong}"


def _wrong_module(container: Container, module: Module) -> str:
    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive(module.path)
    except NotFound:
        return f"is not at {module.path}"
    size, digest = _read(chunks, module.size)
    if size != module.size:
        return f"has {size} bytes, the manifest says {module.size}"
    return "" if digest == module.sha256 else "does not have the sha256 that the manifest names"


def _read(chunks: Iterable[bytes], most: int) -> tuple[int, str]:
    """Size and sha256 of the one file of a tar stream; a larger one than `most` is not read."""
    with tarfile.open(fileobj=chunked(chunks), mode="r|") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is None or member.size > most:
                return member.size, ""
            digest = hashlib.sha256()
            while block := stream.read(_BLOCK):
                digest.update(block)
            return member.size, digest.hexdigest()
    return 0, ""
