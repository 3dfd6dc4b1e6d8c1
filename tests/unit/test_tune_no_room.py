"""A disk or a memory that is full: a rank still says so, what it had finished is no reason to end, and two results do not collide."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import cache_samples
import pytest

from pipeline.contract.places import MANIFEST_FILE
from pipeline.tune import rank, save
from pipeline.tune.finish import finish
from pipeline.tune.state import StateUnusable, open_state
from pipeline.tune.supervise import Crew, environment, supervise
from pipeline.tune.troubles import RankUsageRefused

# From here on nothing can be written but into the room that what is there already has.
FULL = """
import errno, os, sys
from pathlib import Path
from pipeline.contract import files
from pipeline.tune.rank import live
work = Path(sys.argv[1])
sync = os.fsync

def full(handle):
    if any(path.stat().st_size for path in work.glob("*.reserve")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sync(handle)

def body(steps):
    steps.say("writing the manifest")
    os.fsync = full
    files.write_json(work / "manifest.json", {})

os._exit(live(0, work, body))
"""


def test_a_rank_on_a_full_disk_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    with pytest.raises(RankUsageRefused) as caught:
        supervise(Crew(1, 30.0, tmp_path, launched=False), [(command, {**environment(tmp_path), "RANK": "0"})])
    assert caught.value.message == "No space left on device at: writing the manifest"
    assert "free room" in caught.value.hint


def test_a_state_that_cannot_be_written_is_found_before_anything_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(StateUnusable, match="Read-only"):
        open_state(tmp_path)


def test_two_results_of_one_key_at_once_are_put_in_place_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "key"
    place.mkdir()
    first_is_between, moved = threading.Event(), Path.rename

    def slow(path: Path, target: Path) -> Path:
        found = moved(path, target)
        if path == place and not first_is_between.is_set():  # the old one is away, the new one not there yet
            first_is_between.set()
            time.sleep(0.5)  # the second one comes
        return found

    monkeypatch.setattr(Path, "rename", slow)
    failed: list[OSError] = []

    def put(name: str) -> None:
        made = tmp_path / name / "new"
        made.mkdir(parents=True)
        (made / "manifest.json").touch()
        try:
            save.put_in_place(made, place)
        except OSError as error:
            failed.append(error)
        shutil.rmtree(made.parent, ignore_errors=True)

    first, second = (threading.Thread(target=put, args=(name,)) for name in ("first", "second"))
    first.start()
    assert first_is_between.wait(60)
    second.start()
    first.join(60)
    second.join(60)
    assert failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("meanwhile", ["gone", "in use"])
def test_two_that_begin_at_once_find_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    place, once, made = tmp_path / "out", iter([True]), tempfile.mkdtemp

    def other(**words: Any) -> str:
        if next(once, False) and meanwhile == "gone":
            place.rmdir()
        elif meanwhile == "in use":
            (place / "of another").mkdir(exist_ok=True)
        return str(made(**words))

    monkeypatch.setattr(tempfile, "mkdtemp", other)
    save.open_out(place)
    assert place.exists() == (meanwhile == "in use")


def test_what_is_in_the_way_of_a_result_is_named(tmp_path: Path) -> None:
    found, data = cache_samples.manifest()
    saved = rank.saved_path(tmp_path)
    saved.parent.mkdir()
    saved.write_bytes(data)
    saved.with_name(MANIFEST_FILE).write_text(json.dumps(found.to_json()))
    out = tmp_path / "out"
    out.mkdir()
    (out / found.key.split("/")[0]).touch()
    with pytest.raises(save.OutUnusable) as caught:
        finish(out, tmp_path, tmp_path)
    assert caught.value.message.startswith(f"{out}/{found.key.split('/')[0]}")
    assert caught.value.hint.startswith("nothing was saved; --state keeps what was tuned; move what is in the way")


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("Storage size calculation overflowed with sizes=[1000000000000, 1000000000000]"),
    ],
)
def test_memory_that_runs_out_anywhere_is_said_without_a_traceback(error: Exception) -> None:
    failure = rank.describe(3, error, "preparing o (mm_bf16)")
    assert (failure.kind, failure.message) == ("refused", "out of memory at: preparing o (mm_bf16)")
    assert "--max-tokens" in failure.hint
    assert len(failure.details) == 1
