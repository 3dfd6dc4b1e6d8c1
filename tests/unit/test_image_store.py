"""The store on the host that is full, gone or somebody else's."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.image import tuning
from pipeline.image.store import Inputs, StoreUnusable, keep, take

INPUTS = Inputs("plan", "tuner", {}, {})


def made(place: Path) -> Path:
    root = place / "root"
    root.mkdir(parents=True)
    (root / "file").write_text("tuned")
    return root


def test_what_is_kept_is_moved_there_and_replaces_what_was(tmp_path: Path) -> None:
    for turn in ("one", "two"):
        root = made(tmp_path / turn)
        kept = keep(tmp_path, INPUTS, root, 1.0)
        assert (kept.root / "file").read_text() == "tuned"
        assert not root.exists()
    assert take(tmp_path, INPUTS) is not None
    assert [one.name for one in (tmp_path / "tuned").iterdir()] == [INPUTS.digest]


def _file(store: Path) -> None:
    store.write_text("")


def _dead_link(store: Path) -> None:
    store.symlink_to("/nowhere/at/all")


@pytest.mark.parametrize("spoil", [_file, _dead_link])
def test_a_store_that_takes_nothing_is_told_before_anything_is_tuned(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path / "tuned")

    class Never:
        def fill(self, place: Path) -> None:
            pytest.fail("tuned in vain")

    with pytest.raises(StoreUnusable, match="cannot be written to: File exists"):
        tuning.tune(Never(), INPUTS, tmp_path, tmp_path / "log", {})


def test_a_store_on_a_mount_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    root = made(tmp_path / "made")
    # As between two file systems, where a folder is copied file by file.
    monkeypatch.setattr(shutil, "move", lambda source, target: shutil.copytree(source, target, copy_function=full))
    with pytest.raises(StoreUnusable, match="No space left on device"):
        keep(tmp_path, INPUTS, root, 1.0)
    assert (root / "file").exists()
    assert not list((tmp_path / "tuned").iterdir())
