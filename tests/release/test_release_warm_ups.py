"""What `warm-up --in-place` wrote, in a registry: there and back, signed, and what anyone else may have put there."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from release_registries import NOBODY, QUICK

from pipeline.contract.errors import Exit
from pipeline.contract.files import write_json
from pipeline.image.producer import CacheDir, WarmUp, write_entry
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import EMPTY, LAYER_GZIP, MANIFEST, Manifest
from pipeline.release.warm_ups import FOLDER, WARM_UP
from pipeline.servers.judge import Summary
from pipeline.servers.manifest import FILE, Served, ServerManifest

SITE = "/usr/lib/python3/dist-packages"


def write(folder: Path, **changed: object) -> Path:
    """A small folder as the command leaves it: data, a library that may be executed, byte code, a manifest."""
    root = folder / "root"
    places = {"inductor": "/opt/warm/inductor", "python-bytecode": SITE, "manifest": "/opt/pipeline/server"}
    for path in places.values():
        (root / path.lstrip("/") / "ab/cd").mkdir(parents=True)
        (root / path.lstrip("/") / "ab/cd/data=1.bin").write_bytes(b"\0" * 3000)
    library = root / "opt/warm/inductor/kernel.so"
    library.write_bytes(b"\x7fELF")
    library.chmod(0o755)
    served = Served(("--model", "/m"), {"/m/config.json": "{}"}, Summary(60.0), Summary(28.0))
    told = ServerManifest("vllm", {}, (), {"vllm": "0.32.0"}, (), "NVIDIA H200", (served,), {"inductor": 3004})
    write_json(root / FILE.lstrip("/"), told.to_json())
    caches = tuple(CacheDir(kind, path, 3000, writable=kind == "inductor") for kind, path in places.items())
    write_entry(folder, replace(WarmUp(root, caches, manifests=(FILE,)), **changed), {"server": "vllm"})
    return folder


def files(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Content by path, and whether it may be executed."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in found}


def test_there_and_back_signed(plain, pipeline, keys, other_keys, tmp_path):
    private, public = keys
    made = write(tmp_path / "made")
    name = f"oci://{plain.host}/warm-ups/h200:one"
    done = pipeline("cache", "push", made, name, "--sign", private)
    assert done.returncode == 0, done.stderr
    assert "vllm on NVIDIA H200" in done.stderr
    by_digest = done.stdout.strip()
    assert pipeline("cache", "push", made, name, "--sign", private).stdout.strip() == by_digest
    (tmp_path / "empty").mkdir()
    place = (tmp_path / "empty").stat().st_ino
    for number, (source, out) in enumerate(((name, "new/back"), (by_digest, "empty"))):
        done = pipeline("cache", "pull", source, "-o", tmp_path / out, "--key", public)
        assert (done.returncode, done.stdout.strip()) == (0, by_digest), (number, done.stderr)
        assert files(tmp_path / out) == files(made)
        assert pipeline("cache", "push", tmp_path / out, name).stdout.strip() == by_digest, "the same bytes"
    assert (tmp_path / "empty").stat().st_ino == place, "a mount point cannot be replaced"
    assert pipeline("cache", "pull", name, "-o", tmp_path / "not", "--key", other_keys[1]).returncode == Exit.PUBLISH
    assert pipeline("cache", "pull", name, "-o", tmp_path / "empty").returncode == Exit.USAGE
    done = pipeline("cache", "ls", name)
    assert done.returncode == Exit.CACHE and "a server's warm-up" in done.stderr
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_baked_is_not_pushed(plain, pipeline, tmp_path):
    name = f"oci://{plain.host}/warm-ups/bad:one"
    damaged = write(tmp_path / "damaged")
    (damaged / "root" / FILE.lstrip("/")).write_text("{}")
    strange = write(tmp_path / "strange")
    (strange / "root/opt/warm/inductor/a\\b").touch()
    for folder, said in ((damaged, "no manifest of a server"), (strange, "takes no such name")):
        done = pipeline("cache", "push", folder, name)
        assert done.returncode == Exit.CACHE and said in done.stderr, done.stderr
    with Registry(plain.host, NOBODY, QUICK) as registry:
        assert registry.resolve("warm-ups/bad", "one") is None


def tar_of(folder: Path, *more: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        if folder.exists():
            archive.add(folder, FOLDER)
        for member in more:
            archive.addfile(member)
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("more", "changed", "said"),
    [
        pytest.param(member(f"{FOLDER}/root/opt/warm/x", tarfile.SYMTYPE, "/etc/passwd"), {}, "is a link", id="link"),
        pytest.param(member(f"{FOLDER}/../../x"), {}, "leads out", id="out of it"),
        pytest.param(member(f"{FOLDER}/warmup.json"), {}, "occurs twice", id="twice"),
        pytest.param(None, {"caches": (CacheDir("inductor", "/opt/warm/none", 3),)}, "is not in it", id="incomplete"),
    ],
)
def test_what_anyone_put_there_is_judged_and_leaves_nothing(more, changed, said, plain, pipeline, tmp_path):
    made = write(tmp_path / "made", **changed)
    layer = gzip.compress(tar_of(made, *([more] if more else [])))
    with Registry(plain.host, NOBODY, QUICK) as registry:
        config = registry.put_blob("warm-ups/wrong", b"{}", EMPTY)
        named = registry.put_blob("warm-ups/wrong", layer, LAYER_GZIP)
        value = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": WARM_UP, "config": config.to_json(),
                 "layers": [named.to_json()]}  # fmt: skip
        registry.put_manifest("warm-ups/wrong", Manifest.of(json.dumps(value).encode()), "one")
    done = pipeline("cache", "pull", f"oci://{plain.host}/warm-ups/wrong:one", "-o", tmp_path / "out/back")
    assert done.returncode == Exit.CACHE and said in done.stderr, done.stderr
    assert not list((tmp_path / "out").glob("*"))
