"""Folders in which something is made: those of processes that were killed are removed, never those of one that lives."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import cache_samples
import pytest

from pipeline.contract.files import scratch, whole_folder
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.record import Key
from pipeline.tune.publish import publish

MAKER = """
import sys
from pathlib import Path
from pipeline.contract.files import scratch
with scratch(Path(sys.argv[1]), ".making-") as made:
    (made / "file").touch()
    print(made, flush=True)
    sys.stdin.read()
"""


def maker(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that makes something in `folder` until its stdin ends, and the folder it makes it in."""
    command = [sys.executable, "-c", MAKER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_makes_is_not(tmp_path: Path) -> None:
    killed, left = maker(tmp_path)
    living, kept = maker(tmp_path)
    try:
        killed.kill()
        killed.communicate()
        (tmp_path / ".making-file").touch()
        (tmp_path / "of another name").mkdir()
        assert (left / "file").exists()
        with scratch(tmp_path, ".making-") as first, scratch(tmp_path, ".making-") as second:
            assert first.is_dir() and second.is_dir()  # two in one process do not take each other for dead
            assert (kept / "file").exists()
            assert not left.exists()
    finally:
        living.communicate("")
    assert living.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".making-file", "of another name"]


def test_where_no_locks_are_known_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".making-left").mkdir()

    def unknown(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with scratch(tmp_path, ".making-") as made:
        assert made.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [".making-left"]


def test_a_result_takes_away_what_a_killed_tune_left_and_puts_its_earlier_key_back(tmp_path: Path) -> None:
    found, data = cache_samples.manifest()
    key = Key.parse(found.key)
    file = tmp_path / CACHE_FILE
    file.write_bytes(data)
    parent = tmp_path / "out" / key.flashinfer_version / key.arch
    place, other = parent / key.hash, parent / ("0" * 64)
    for left in (".making-a/new", f".making-b/{other.name}", f".making-c/{key.hash}"):
        (parent / left).mkdir(parents=True)
        (parent / left / "of old").touch()
    for _ in range(2):  # for the first time, and in an earlier one's place
        assert publish(tmp_path / "out", key, file, found) == place
        assert sorted(path.name for path in parent.iterdir()) == sorted([other.name, key.hash])
        assert sorted(path.name for path in place.iterdir()) == sorted([CACHE_FILE, MANIFEST_FILE])
        assert (other / "of old").exists()


def test_an_empty_folder_that_cannot_be_filled_to_the_end_is_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def stopped(source: Path, target: Path) -> Path:
        if target == tmp_path / "b":
            raise KeyboardInterrupt
        return rename(source, target)

    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path) as made:
        for name in "abc":
            (made / name).mkdir()
        monkeypatch.setattr(Path, "rename", stopped)
    assert not list(tmp_path.iterdir())
