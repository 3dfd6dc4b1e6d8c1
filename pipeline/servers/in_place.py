"""Warm up and prove without a Docker Engine: inside a container that a cluster started.

A warm-up runs in the server's image and writes a folder as the store of a host has it: `root/` with the files as they
will lie in the image, and warmup.json. A proof runs in the finished image.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import CacheRefused, UsageError, WarmUpError
from pipeline.contract.files import scratch
from pipeline.contract.verdict import Verdict
from pipeline.image.producer import ROOT_FOLDER, WARMUP_FILE, WarmUp, read_entry, write_entry

from . import kinds, manifest
from .adapters import FACTS
from .containers import Watched
from .manifest import ServerManifest
from .producer import ServerProducer, from_manifest, manifest_of, room_for_caches
from .watch import Order, facts_of, watch


def warm_up_in_place(producer: ServerProducer, out: Path, *, ready: float) -> WarmUp:
    """Start the server here, and write an entry to the folder `out`. `ready` is the timeout of one start, in seconds.

    Raises `UsageError` where the caches' root cannot be written, `WarmUpError` where the server does not start.
    """
    began = time.monotonic()
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", hint="name a new folder")
    _check_root()
    placed = producer.laid(producer.environment().get("HF_HOME") or os.environ.get("HF_HOME", ""))
    out.parent.mkdir(parents=True, exist_ok=True)
    with room_for_caches(), scratch(out.parent, ".warm-up-") as work, _placed(placed):
        watched = Watched.read(watch(producer.order(ready=ready), work), work)
        entry = work / "entry"
        entry.mkdir()
        warm = replace(producer.described(watched, entry / ROOT_FOLDER, placed), seconds=time.monotonic() - began)
        write_entry(entry, warm, producer.inputs())
        with contextlib.suppress(FileNotFoundError):
            out.rmdir()
        entry.rename(out)
    log.note(f"{out}: bake it with CACHE={out} and this very image as BASE_IMAGE; `pipeline cache push` sends it")
    return replace(warm, root=out / ROOT_FOLDER)


def read_folder(folder: Path) -> ServerManifest:
    """The manifest of a complete folder that `warm_up_in_place` wrote. Raises `CacheRefused`."""
    told = manifest_of(folder)
    read_entry(folder)
    return told


def check_entry(producer: ServerProducer, entry: Path, packages: Mapping[str, str]) -> ServerManifest:
    """The manifest of a folder that `warm_up_in_place` wrote, for an image that has `packages`.

    Raises `CacheRefused` where it was made with other versions, or from other words or another model.
    """
    told = read_folder(entry)
    for name, version in packages.items():
        if version and told.versions.get(name, version) != version:
            raise CacheRefused(
                f"{entry} was made with {name} {told.versions[name]}, and the image has {version}",
                hint="BASE_IMAGE= must be the very image in which the server was started",
            )
    asked = json.loads(json.dumps(producer.inputs()))
    for name, value in json.loads((entry / WARMUP_FILE).read_text(encoding="utf-8"))["inputs"].items():
        if value != asked.get(name):
            raise CacheRefused(
                f"{entry} was made with another value of {name}: {json.dumps(value)[:200]}",
                hint="give MODEL, SERVER_ARGS and SERVER_ENV as they were given to `pipeline warm-up --in-place`",
            )
    return told


def prove_in_place(about: Verdict, *, ready: float) -> Verdict:
    """Start the server of the finished image in which this runs. `about` is the verdict of the host that baked it.

    Whose image it is cannot be seen from inside: the manifest must be the one that `about` names. Raises `CacheRefused`
    where it is not, `UsageError` on another device.
    """
    file = Path(manifest.FILE)
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if sha256_json(text) not in about.manifest_sha256.split(","):
        raise CacheRefused(f"this is not the image of that verdict: {file} is another", hint="run it inside the image")
    told = ServerManifest.read(text)
    producer = from_manifest(told)
    orders = [Order((producer.spec(words, ready=ready, most=1),), FACTS) for words in producer.sets]
    device = facts_of(orders[0]).get("gpu") or "cpu"
    if device != told.device:
        raise UsageError(f"the caches were made on {told.device}, and this is {device}", hint="run it on that device")
    starts = {}
    for number, (order, served) in enumerate(zip(orders, told.sets, strict=True), start=1):
        with _placed([served.model]), tempfile.TemporaryDirectory() as work:
            result = watch(order._replace(facts=()), Path(work))
            starts[f"in place, set {number}"] = (served, Watched.read(result, Path(work)).starts[0][-1])
    proof = producer.proof(told, text, starts)
    return replace(
        about, level=proof.level, result="fail" if proof.findings else "pass", checks=proof.checks,
        findings=proof.findings, starts=proof.starts,
    )  # fmt: skip


def _check_root() -> None:
    """Raise `UsageError` unless the caches' root can be written and holds nothing."""
    root = Path(kinds.ROOT)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / ".probe").touch()
        (root / ".probe").unlink()
    except OSError as error:
        raise UsageError(
            f"{root} cannot be written: {error.strerror}",
            hint=f"a server's caches contain absolute paths: run as root, or mount an empty folder at {root}",
        ) from error
    if any(root.iterdir()):
        raise UsageError(f"{root} is not empty: a cold start cannot be measured", hint="start from a fresh container")


@contextlib.contextmanager
def _placed(sets: Sequence[Mapping[str, str]]) -> Iterator[None]:
    """The model's config files at their paths while the server runs; one that is there already is left as it is."""
    with contextlib.ExitStack() as stack:
        for path, text in ((Path(name), text) for files in sets for name, text in files.items()):
            if not path.exists():
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
                except OSError as error:
                    raise WarmUpError(
                        f"{path} cannot be written: {error.strerror}", hint="name another path"
                    ) from error
                stack.callback(path.unlink, missing_ok=True)
        yield
