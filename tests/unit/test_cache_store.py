"""Baked keys held against their manifests: a sound one passes, and each kind of damage is named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import cache_samples as samples
import pytest

from pipeline.cache.integrity import check_root
from pipeline.cache.tree import find_keys, walk
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.plan import Plan
from pipeline.contract.strictjson import FileMissing


def found(root):
    return [str(f) for f in check_root(root)[1]]


def test_sound_keys_have_no_findings(tmp_path):
    samples.write(tmp_path)
    samples.write(tmp_path, "NVIDIA H200")
    samples.write(tmp_path, "NVIDIA H100 80GB HBM3")
    tree, findings = check_root(tmp_path)
    assert findings == ()
    assert len(tree.keys) == 3
    assert find_keys(tmp_path) == tuple(stored.key for stored in tree.keys)
    assert {stored.key.arch for stored in tree.keys} == {"cpu-x86_64", "90a"}


def test_a_root_that_is_none(tmp_path):
    with pytest.raises(FileMissing):
        walk(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(FileMissing):
        walk(tmp_path / "link")
    assert found(tmp_path / "empty")[0].endswith("has no cache")
    assert find_keys(tmp_path / "none") == ()


def _edit_file(path, change):
    value = json.loads((path / CACHE_FILE).read_text())
    change(value)
    data = json.dumps(value).encode()
    (path / CACHE_FILE).write_bytes(data)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["files"][CACHE_FILE] = {"size": len(data), "sha256": sha256_bytes(data)}
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))


def _edit_manifest(path, **change):
    value = json.loads((path / MANIFEST_FILE).read_text())
    (path / MANIFEST_FILE).write_text(json.dumps({**value, **change}))


def _entry_deleted(path):
    _edit_file(path, lambda value: value.pop(samples.entry_key(8)))


def _entry_changed(path):
    _edit_file(path, lambda value: value.update({samples.entry_key(8): ["TiledRunner", 9]}))


def _wildcard(path):
    _edit_file(path, lambda value: value["_metadata"].update(gpu="*"))


def _other_record(path):
    _edit_file(path, lambda value: value["_metadata"].update(cublas_version="12"))


def _no_metadata(path):
    _edit_file(path, lambda value: value.pop("_metadata"))


def _flipped(path):
    data = bytearray((path / CACHE_FILE).read_bytes())
    data[-5] ^= 1
    (path / CACHE_FILE).write_bytes(bytes(data))


DAMAGE = {
    "deleted entry": (_entry_deleted, "qkv at 8 tokens: entry ('cpu_gemm', 'TiledRunner', ((8, 64)"),
    "other tactic": (_entry_changed, "the file has ['TiledRunner', 9], the manifest ['TiledRunner', 3]"),
    "wildcard": (_wildcard, "gpu is '*': FlashInfer would not compare it"),
    "other record": (_other_record, "cublas_version is 12 in the file and unknown in the manifest's record"),
    "no metadata": (_no_metadata, "has no _metadata"),
    "flipped bit": (_flipped, "does not have the sha256"),
    "truncated": (lambda p: (p / CACHE_FILE).write_bytes(b"{"), "is not JSON"),
    "other size": (lambda p: (p / CACHE_FILE).write_bytes(b"{}"), "has 2 bytes, the manifest says"),
    "no file": (lambda p: (p / CACHE_FILE).unlink(), "is missing"),
    "no manifest": (lambda p: (p / MANIFEST_FILE).unlink(), "cannot read"),
    "manifest no JSON": (lambda p: (p / MANIFEST_FILE).write_text("{"), "is not JSON"),
    "manifest duplicate": (lambda p: (p / MANIFEST_FILE).write_text('{"a":1,"a":2}'), "the key a stands twice"),
    "manifest of another version": (lambda p: _edit_manifest(p, schema=99), "$.schema: 99, and this version reads 1"),
    "unlisted file": (lambda p: (p / "x.json").write_text("{}"), "x.json is not in the manifest"),
    "directory inside": (lambda p: (p / "d").mkdir(), "is not a regular file"),
    "link inside": (lambda p: (p / "l").symlink_to("/etc/passwd"), "is not a regular file"),
    "pipe inside": (lambda p: os.mkfifo(p / "pipe"), "is not a regular file"),
    "absolute file": (
        lambda p: _edit_manifest(p, files={"/etc/passwd": {"size": 1, "sha256": "0"}}),
        "lists a file named '/etc/passwd'",
    ),
    "dotted file": (lambda p: _edit_manifest(p, files={"..": {"size": 1, "sha256": "0"}}), "lists a file named '..'"),
    "owner out of range": (
        lambda p: _edit_manifest(p, owners={samples.entry_key(8): [5]}),
        "is owned by the ranks [5] of 2",
    ),
    "owned entry missing": (lambda p: _edit_manifest(p, owners={"nothing": [0]}), "owned entry nothing is not"),
    "rank missing": (
        lambda p: _edit_manifest(p, ranks=json.loads((p / MANIFEST_FILE).read_text())["ranks"][:1]),
        "tuned by the ranks [0], the plan has 2",
    ),
    "shape of ranks": (
        lambda p: _edit_manifest(p, ranks=[{"rank": 0}]),
        "$.ranks[0].host is missing",
    ),
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_each_kind_of_damage_is_found(tmp_path, kind):
    damage, expected = DAMAGE[kind]
    damage(samples.write(tmp_path))
    lines = found(tmp_path)
    assert any(expected in line for line in lines), lines


def test_all_reasons_at_once(tmp_path):
    path = samples.write(tmp_path)
    _entry_deleted(path)
    _wildcard(path)
    (path / "x").write_text("")
    (tmp_path / "stray").write_text("")
    lines = found(tmp_path)
    for part in ("stray: lies where only", "x is not in", "gpu is '*'", "qkv at 8 tokens"):
        assert any(part in line for line in lines), (part, lines)


def test_a_directory_moved_to_another_key_is_found(tmp_path):
    path = samples.write(tmp_path)
    other = path.with_name("0" * 64)
    path.rename(other)
    lines = found(tmp_path)
    assert any("the manifest names the key" in line for line in lines)
    assert any("own inputs give the key" in line for line in lines)


def test_a_cache_for_another_arch_is_found(tmp_path):
    path = samples.write(tmp_path, "NVIDIA H200")
    moved = path.parent.parent / "100a" / path.name
    moved.parent.mkdir()
    path.rename(moved)
    path.parent.rmdir()
    assert any("is for the architecture '90a'" in line or "architecture 90a" in line for line in found(tmp_path))


@pytest.mark.parametrize("name", ["not-a-hash", "A" * 64, "0" * 63])
def test_names_that_are_no_keys(tmp_path, name):
    path = samples.write(tmp_path)
    path.rename(path.with_name(name))
    assert any("hexadecimal digits" in line for line in found(tmp_path))
    assert find_keys(tmp_path) == ()


def test_links_are_never_followed(tmp_path):
    real = tmp_path / "real"
    path = samples.write(real)
    root = tmp_path / "root"
    (root / "0.6.16.post3").mkdir(parents=True)
    (root / "0.6.16.post3" / "cpu-x86_64").symlink_to(path.parent)
    tree, findings = check_root(root)
    assert tree.keys == ()
    assert any("is a symbolic link" in f.what for f in findings)
    shutil.copytree(path.parent.parent, root / "copy")
    target = root / "copy" / "cpu-x86_64" / path.name / CACHE_FILE
    target.unlink()
    target.symlink_to(path / CACHE_FILE)
    assert any("is not a regular file" in str(f) for f in check_root(root)[1])


@pytest.mark.parametrize(
    ("closed", "mode", "said"),
    [
        (lambda p: p / CACHE_FILE, 0, f"{CACHE_FILE}: cannot read "),
        (lambda p: p / MANIFEST_FILE, 0, f"{MANIFEST_FILE}: cannot read "),
        (lambda p: p, 0o600, f"{CACHE_FILE}: cannot be read: Permission denied"),
        (lambda p: p.parent, 0, "cannot be read: Permission denied"),
    ],
)
def test_what_may_not_be_read_is_a_finding_of_its_key(closed, mode, said):
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which only its owner may enter
        root = Path(folder)
        root.chmod(0o755)
        samples.write(root, "NVIDIA H100")
        path = samples.write(root, "NVIDIA H200")
        other = root / "0.6.16.post3" / "90b" / path.name
        other.parent.mkdir()
        shutil.move(path, other)
        place = closed(other)
        place.chmod(mode)
        with somebody():
            lines = found(root)
        place.chmod(0o755)
    assert any(said in line for line in lines), lines
    assert not any(line.startswith("0.6.16.post3/90a/") for line in lines)


@contextlib.contextmanager
def somebody():
    """Not as root, who may read all."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_coverage_is_held_against_the_plan(tmp_path):
    made, _ = samples.manifest()
    rows = made.covered
    samples.write(tmp_path / "a", covered=rows[:-1])
    assert any("qkv at 64 tokens is planned and not covered" in line for line in found(tmp_path / "a"))
    samples.write(tmp_path / "b", covered=(*rows, rows[0]))
    assert any("qkv at 1 tokens is covered twice by one entry" in line for line in found(tmp_path / "b"))
    samples.write(tmp_path / "c", covered=(*rows, replace(rows[0], bucket=3)))
    assert any("qkv at 3 tokens is covered and not planned" in line for line in found(tmp_path / "c"))
    samples.write(tmp_path / "d", covered=tuple(replace(row, candidates=0) for row in rows))
    assert any("no candidate was timed" in line for line in found(tmp_path / "d"))


def test_a_plan_of_nothing_covers_nothing(tmp_path):
    made, _ = samples.manifest()
    empty = Plan(**{**vars(made.plan), "ops": ()})
    samples.write(tmp_path, plan=empty, covered=())
    assert any("the plan tunes nothing" in line for line in found(tmp_path))


def test_ranks_must_hold_what_the_owners_say(tmp_path):
    made, _ = samples.manifest()
    ranks = (made.ranks[0], replace(made.ranks[1], entries=2))
    samples.write(tmp_path / "a", ranks=ranks)
    assert any("rank 1 reported 2 entries, the file has 3 of its own" in line for line in found(tmp_path / "a"))
    samples.write(tmp_path / "b", ranks=ranks, owners={samples.entry_key(8): (0,)})
    assert found(tmp_path / "b") == []


def test_ranks_on_different_gpus_are_found(tmp_path):
    made, _ = samples.manifest("NVIDIA H200")
    samples.write(tmp_path, "NVIDIA H200", ranks=(made.ranks[0], replace(made.ranks[1], gpu="NVIDIA H100")))
    assert any("different GPUs: NVIDIA H100, NVIDIA H200" in line for line in found(tmp_path))


def test_a_gpu_record_without_the_gpu_is_found(tmp_path):
    samples.write(tmp_path, "unknown")
    assert any("does not name the GPU" in line for line in found(tmp_path))
