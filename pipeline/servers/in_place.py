"""The same warm-up without a Docker Engine: inside a container of the server's image that a cluster started.

It writes a folder as the store of a host has it: `root/` with the files as they will lie in the image, and warmup.json.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import UsageError, WarmUpError
from pipeline.contract.scratch import scratch
from pipeline.image.producer import ROOT_FOLDER, WarmUp, write_entry

from . import collect, kinds, watch
from .containers import Watched
from .model import laid
from .producer import MOST, ServerProducer, check, described


def warm_up_in_place(producer: ServerProducer, out: Path, *, ready: float) -> WarmUp:
    """Start the server here, and write an entry to the folder `out`. `ready` bounds one start, in seconds.

    Raises `UsageError` where the caches' root cannot be written, `WarmUpError` where the server does not start.
    """
    began = time.monotonic()
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", hint="name a new folder")
    _check_root()
    home = producer.environment().get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    placed = laid(producer.words, producer.files, home)
    out.parent.mkdir(parents=True, exist_ok=True)
    with scratch(out.parent, ".warm-up-") as work, _placed(placed):
        spec = producer.spec(ready=ready, most=MOST, pack=True)
        starts, facts = watch.watch(spec, work)
        check(producer.name, tuple(starts), "")
        notes = collect.pack(starts, facts, work / collect.PACK)
        watched = Watched(tuple(starts), facts, tuple(notes), work / collect.PACK)
        entry = work / "entry"
        entry.mkdir()
        warm = replace(described(producer, watched, entry / ROOT_FOLDER, placed), seconds=time.monotonic() - began)
        write_entry(entry, warm, producer.inputs())
        with contextlib.suppress(FileNotFoundError):
            out.rmdir()
        entry.rename(out)
    log.note(f"{out}: the caches as they lie in an image of this very base, and warmup.json")
    return replace(warm, root=out / ROOT_FOLDER)


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
            hint=f"a server's caches hold absolute paths: run as root, or mount an empty folder at {root}",
        ) from error
    if any(root.iterdir()):
        raise UsageError(f"{root} is not empty: a cold start could not be told", hint="start from a fresh container")


@contextlib.contextmanager
def _placed(files: Mapping[str, str]) -> Iterator[None]:
    """The model's config files at their paths while the server runs; one that is there already is left as it is."""
    made: list[Path] = []
    try:
        for name, text in files.items():
            path = Path(name)
            if path.exists():
                if path.name == "config.json" and not _same(path, text):
                    raise UsageError(f"{path} is another model's", hint="give the path at which this model is mounted")
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise WarmUpError(f"{path} cannot be written: {error.strerror}", hint="name another path") from error
            made.append(path)
        yield
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def _same(path: Path, text: str) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == json.loads(text))
    except (OSError, ValueError):
        return False
