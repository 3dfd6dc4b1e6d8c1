"""Imported caches from before answers were written under second keys are baked with them; all others as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_samples as samples
import pytest

from pipeline.cache.otherkeys import other_keys
from pipeline.cache.store import check_root
from pipeline.contract.digest import sha256_file
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.image import flow, retune
from pipeline.image.caches import collect
from pipeline.image.complete import complete
from pipeline.image.contexts import stage_key

H200 = "NVIDIA H200"


def fp8_key(bucket: int) -> str:
    """As FlashInfer 0.6.16.post3 writes it on an H200."""
    fp8 = "torch.float8_e4m3fn"
    shapes = f"((1, {bucket}, 4096), (1, 4096, 6144), (), (), (1, -1, 6144), (-1,))"
    return f"('fp8_gemm', 'CublasFp8GemmRunner', {shapes}, ({fp8}, {fp8}, torch.bfloat16))"


def test_an_earlier_cache_is_completed_when_it_is_baked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "entry_key", fp8_key)
    made, _ = samples.manifest(H200)
    ranks = tuple(replace(rank, entries=2 + rank.rank) for rank in made.ranks)
    path = samples.write(tmp_path / "old", H200, owners={fp8_key(8): (1,)}, ranks=ranks)
    before = {name: sha256_file(path / name) for name in (CACHE_FILE, MANIFEST_FILE)}
    assert check_root(tmp_path / "old")[1] == ()
    (old,) = collect([tmp_path / "old"])
    (new,) = complete([old])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "3 entries of fp8_gemm stand in the file a second time" in said
    assert {name: sha256_file(path / name) for name in before} == before

    new.copy_below(tmp_path / "new")
    (stored,), wrong = check_root(tmp_path / "new")[0].keys, check_root(tmp_path / "new")[1]
    assert wrong == () and stored.file is not None and stored.manifest is not None
    for bucket in (1, 8, 64):
        (other,) = other_keys(fp8_key(bucket))
        assert stored.file.entries[other] == stored.file.entries[fp8_key(bucket)]
    assert len(stored.file.entries) == 6
    assert stored.manifest == new.manifest and "written when it was baked" in stored.manifest.notes[-1]
    assert stored.manifest.owners == dict.fromkeys((fp8_key(8), *other_keys(fp8_key(8))), (1,))
    assert [rank.entries for rank in stored.manifest.ranks] == [4, 6]
    assert new.manifest_sha256 == sha256_file(stored.path / MANIFEST_FILE) != old.manifest_sha256
    assert (new.key, new.manifest.covered) == (old.key, old.manifest.covered)

    again = collect([tmp_path / "new"])
    assert complete(again) == again, "what was completed has nothing to be completed"
    one, two = (stage_key(each, tmp_path / name) for each, name in ((new, "one"), (again[0], "two")))
    files = [
        {p.relative_to(top): (p.read_bytes(), p.stat().st_mtime) for p in top.rglob("*.json")} for top in (one, two)
    ]
    assert files[0] == files[1] and len(files[0]) == 2, "the same layer, whichever of the two is baked"
    assert capsys.readouterr().err == ""


def test_what_has_no_second_keys_is_baked_as_it_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write(tmp_path / "bf16", H200)
    monkeypatch.setattr(samples, "entry_key", fp8_key)
    samples.write_engine(tmp_path / "engine")
    entries = json.loads(next((tmp_path / "engine").rglob(CACHE_FILE)).read_text())
    assert any(other_keys(key) for key in entries), "an engine asks itself, with its own keys"
    for name in ("bf16", "engine"):
        keys = collect([tmp_path / name])
        assert len(keys) == 1 and complete(keys) == keys and not keys[0].rewritten


def test_whoever_bakes_given_caches_completes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "entry_key", fp8_key)
    samples.write(tmp_path, H200)
    given: Any = SimpleNamespace(caches=(tmp_path,), store="")
    unused: Any = None
    (one,) = flow._keys(given, unused, unused, unused, trust_memory=True).keys
    assert one.rewritten and "written when it was baked" in capsys.readouterr().err

    def reached(**_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("pipeline.daemon.ensure", reached)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(InterruptedError):
        retune.graft("image", [tmp_path], given)
    assert "written when it was baked" in capsys.readouterr().err
