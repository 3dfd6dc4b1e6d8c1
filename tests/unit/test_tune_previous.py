"""Which earlier caches a tuning begins with."""

from __future__ import annotations

from pathlib import Path

import cache_samples as samples

from pipeline.tune.previous import find_earlier

H200 = "NVIDIA H200"


def test_the_newest_sound_cache_of_this_environment_is_taken_up(tmp_path: Path) -> None:
    samples.write(tmp_path, H200)
    found = find_earlier(tmp_path, samples.record(H200))
    assert found.data and len(found.covered) == 3
    assert found.notes[0].startswith("took up 3 buckets")
    assert not find_earlier(tmp_path, samples.record("NVIDIA B200")).data


def test_a_folder_without_a_cache_is_said(tmp_path: Path) -> None:
    assert find_earlier(None, samples.record(H200)).notes == ()
    for place, said in ((tmp_path, "holds none"), (tmp_path / "absent", "is not a directory")):
        (note,) = find_earlier(place, samples.record(H200)).notes
        assert note == f"no earlier cache was taken up: {place} {said}"
