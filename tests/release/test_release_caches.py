"""Tuned caches in a registry: there and back, judged both ways, and as oras and skopeo read and write them."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile

import cache_samples
import pytest
import release_samples as samples
from release_registries import NOBODY, PASSWORD, QUICK, USER, auth_of, command

from pipeline.cache.integrity import check_root
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import Exit
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import EMPTY, IMAGE_CONFIG, LAYER_GZIP, MANIFEST, OCTETS, Manifest
from pipeline.registry.reference import Reference
from pipeline.release import caches
from pipeline.release.caches import CACHE, CACHE_TAR


def files(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_all_that_is_pushed_can_be_pulled(plain, tmp_path):
    """More than 64 MiB unpacked: five keys whose files are padded with spaces."""
    for number in range(5):
        place = cache_samples.write(tmp_path / "root", f"NVIDIA H{number}00")
        data = (place / CACHE_FILE).read_bytes() + b" " * (14 << 20)
        (place / CACHE_FILE).write_bytes(data)
        manifest = json.loads((place / MANIFEST_FILE).read_text())
        manifest["files"][CACHE_FILE] = {"size": len(data), "sha256": sha256_bytes(data)}
        (place / MANIFEST_FILE).write_text(json.dumps(manifest))
    name = Reference(plain.host, "caches/large", "one")
    with Registry(plain.host, NOBODY, QUICK) as registry:
        caches.push(registry, tmp_path / "root", "root", name)
        caches.pull(registry, name, tmp_path / "back")
    assert files(tmp_path / "back") == files(tmp_path / "root")


def test_there_and_back_and_by_oras_and_skopeo(plain, pipeline, tmp_path):
    for gpu in ("", "NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        cache_samples.write(tmp_path / "root", gpu)
    (tmp_path / "root" / "0.6.16.post3").chmod(0o700)
    name = f"oci://{plain.host}/caches/three:one"
    done = pipeline("cache", "push", tmp_path / "root", name)
    assert done.returncode == 0, done.stderr
    by_digest = done.stdout.strip()
    assert by_digest.startswith(f"oci://{plain.host}/caches/three@sha256:")
    before = plain.blobs()
    assert (
        pipeline("cache", "push", tmp_path / "root", name).stdout.strip() == by_digest
    )  # the same cache, the same digest
    assert plain.blobs() == before
    for number, source in enumerate((name, by_digest)):
        done = pipeline("cache", "pull", source, "-o", tmp_path / f"back{number}")
        assert done.returncode == 0 and done.stdout.strip() == by_digest, done.stderr
        assert files(tmp_path / f"back{number}") == files(tmp_path / "root")
    rows = json.loads(pipeline("cache", "ls", name, "--json").stdout)
    assert len(rows) == 3 and all(row["path"].startswith(f"{name} ") for row in rows), "read where it lies"
    assert pipeline("cache", "diff", name, tmp_path / "root").returncode == 0
    assert pipeline("explain", name).returncode in (0, 7)
    raw = samples.inspect(name.removeprefix("oci://"))
    assert raw["artifactType"] == CACHE and raw["config"]["mediaType"] == IMAGE_CONFIG
    with Registry(plain.host, NOBODY, QUICK) as registry:
        labels = json.loads(registry.blob("caches/three", raw["config"]["digest"]))["config"]["Labels"]
    devices = {one["device"] for one in json.loads(labels["io.github.tuned-image-pipeline.caches"])}
    assert devices == {"A CPU", "NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    hashes = labels["io.kserve.km/cache-hash"].split(",")  # as KServe's kernel-cache manager reads them
    assert sorted(hashes) == sorted(path.parent.name for path in (tmp_path / "root").rglob(MANIFEST_FILE))
    assert (labels["io.kserve.km/framework"], labels["io.kserve.km/cache-type"]) == (
        "flashinfer",
        "flashinfer-autotune",
    )
    assert labels["io.kserve.km/cache-mount-subpath"] == "flashinfer_autotune_cache"
    assert labels["io.kserve.km/cache-root-env"] == "PIPELINE_AUTOTUNE_CACHE_DIR=/opt/flashinfer_autotune_cache"
    command("oras", "pull", "--plain-http", "-o", tmp_path / "oras", name.removeprefix("oci://"))
    assert files(tmp_path / "oras" / caches.FOLDER) == files(tmp_path / "root")
    assert check_root(tmp_path / "oras" / caches.FOLDER)[1] == ()
    here, there = name.removeprefix("oci://"), f"{plain.host}/caches/copied:one"
    command(
        "skopeo", "copy", "--src-tls-verify=false", "--dest-tls-verify=false", f"docker://{here}", f"docker://{there}"
    )
    assert pipeline("cache", "pull", f"oci://{there}", "-o", tmp_path / "copied").returncode == 0


def test_what_oras_pushed_is_pulled(plain, pipeline, tmp_path):
    cache_samples.write(tmp_path / caches.FOLDER, "NVIDIA H200")
    done = subprocess.run(
        ["oras", "push", "--plain-http", "--artifact-type", CACHE, f"{plain.host}/caches/byoras:one",
         f"{caches.FOLDER}/:{CACHE_TAR}"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = pipeline("cache", "pull", f"oci://{plain.host}/caches/byoras:one", "-o", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "back") == files(tmp_path / caches.FOLDER)


def test_an_unsound_cache_is_not_pushed_and_a_tag_is_not_moved(plain, pipeline, tmp_path):
    place = cache_samples.write(tmp_path / "bad")
    (place / CACHE_FILE).write_text("{")
    done = pipeline("cache", "push", tmp_path / "bad", f"oci://{plain.host}/caches/bad:one")
    assert done.returncode == Exit.CACHE and "not JSON" in done.stderr
    (tmp_path / "empty").mkdir()
    done = pipeline("cache", "push", tmp_path / "empty", f"oci://{plain.host}/caches/bad:one")
    assert done.returncode == Exit.CACHE, done.stderr
    cache_samples.write(tmp_path / "one")
    cache_samples.write(tmp_path / "two", tactic=5)
    name = f"oci://{plain.host}/caches/moved:one"
    assert pipeline("cache", "push", tmp_path / "one", name).returncode == 0
    done = pipeline("cache", "push", tmp_path / "two", name)
    assert done.returncode == Exit.PUBLISH and "is another cache" in done.stderr and "--move" in done.stderr
    assert pipeline("cache", "push", tmp_path / "two", name, "--move").returncode == 0
    with Registry(plain.host, NOBODY, QUICK) as registry:
        assert registry.resolve("caches/bad", "one") is None


def _put(registry, layers, kind=CACHE, repository="caches/wrong", tag="one"):
    config = registry.put_blob(repository, b"{}", EMPTY)
    named = [registry.put_blob(repository, content, layer_kind).to_json() for layer_kind, content in layers]
    body = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": kind,
        "config": config.to_json(),
        "layers": named,
    }
    registry.put_manifest(repository, Manifest.of(json.dumps(body).encode()), tag)


def _tar(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


LINK = tarfile.TarInfo(f"{caches.FOLDER}/link")
BAD = [
    ("no gzip", [(CACHE_TAR, b"plainly not")], "not gzip"),
    ("cut gzip", [(CACHE_TAR, gzip.compress(_tar((f"{caches.FOLDER}/a", b"x" * 5000)))[:-20])], "not gzip"),
    ("out of it", [(CACHE_TAR, gzip.compress(_tar((f"{caches.FOLDER}/../../etc/x", b"")))) ], "leads out"),
    ("a bomb", [(CACHE_TAR, gzip.compress(b"\0" * (65 << 20)))], ""),
    ("no manifest", [(CACHE_TAR, gzip.compress(_tar((f"{caches.FOLDER}/0.6/90a/{'0' * 64}/{CACHE_FILE}", b"{}"))))], "manifest"),
    ("no key", [(CACHE_TAR, gzip.compress(_tar()))], ""),
    ("two layers", [(CACHE_TAR, b"a"), (CACHE_TAR, b"b")], "not one layer"),
    ("no cache", [(OCTETS, b"a")], "not one layer"),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "what"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_is_no_sound_cache_is_not_pulled_and_leaves_nothing(layers, what, plain, tmp_path, capsys):
    from pipeline.__main__ import main

    with Registry(plain.host, NOBODY, QUICK) as registry:
        _put(registry, layers)
    out = tmp_path / "out"
    assert main(["cache", "pull", f"oci://{plain.host}/caches/wrong:one", "-o", str(out)]) == Exit.CACHE
    said = capsys.readouterr().err
    assert what in said and "error: " in said
    assert list(tmp_path.iterdir()) == []


def test_pull_refuses_images_taken_places_and_bad_names(plain, tmp_path, capsys):
    from pipeline.__main__ import main

    cache_samples.write(tmp_path / "root")
    with Registry(plain.host, NOBODY, QUICK) as registry:
        _put(registry, [(LAYER_GZIP, b"x")], kind="application/vnd.other", tag="other")
    assert main(["cache", "pull", f"oci://{plain.host}/caches/wrong:other", "-o", str(tmp_path / "out")]) == Exit.CACHE
    assert main(["cache", "push", str(tmp_path / "root"), f"oci://{plain.host}/caches/taken"]) == 0
    assert main(["cache", "pull", f"oci://{plain.host}/caches/taken", "-o", str(tmp_path / "root")]) == Exit.USAGE
    below = tmp_path / "root" / "file" / "out"
    below.parent.write_text("no directory")
    assert main(["cache", "pull", f"oci://{plain.host}/caches/taken", "-o", str(below)]) == Exit.USAGE
    below.parent.unlink()
    assert main(["cache", "pull", f"oci://{plain.host}/caches/taken:none", "-o", str(tmp_path / "out")]) == Exit.PUBLISH
    for bad in ("caches/taken", "oci://caches/taken", "oci://", f"docker://{plain.host}/x"):
        assert main(["cache", "pull", bad, "-o", str(tmp_path / "out")]) == Exit.USAGE
    assert main(["cache", "push", str(tmp_path / "root"), f"oci://{plain.host}/x@sha256:{'0' * 64}"]) == Exit.USAGE
    assert "Traceback" not in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_signed_with_a_password_through_tls_and_demanded(logged_in, trusted, keys, other_keys, pipeline, tmp_path):
    private, public = keys
    cache_samples.write(tmp_path / "root", "NVIDIA H200")
    for host in (logged_in.host, trusted.host):
        name = f"oci://{host}/caches/signed:one"
        done = pipeline("cache", "push", tmp_path / "root", name, "--sign", private)
        assert done.returncode == 0, done.stderr
        done = pipeline("cache", "pull", name, "-o", tmp_path / f"out-{host}", "--key", public)
        assert done.returncode == 0, done.stderr
        assert (next((tmp_path / f"out-{host}").rglob(MANIFEST_FILE))).is_file()
        done = pipeline("cache", "pull", name, "-o", tmp_path / "not", "--key", other_keys[1])
        assert done.returncode == Exit.PUBLISH and "is not signed by" in done.stderr
    assert not (tmp_path / "not").exists()
    done = pipeline(
        "cache", "push", tmp_path / "root", f"oci://{logged_in.host}/caches/anonymous", env={"DOCKER_CONFIG": "/none"}
    )
    assert done.returncode == Exit.PUBLISH and "docker login" in done.stderr and PASSWORD not in done.stderr
    wrong = json.dumps({"auths": {logged_in.host: auth_of(USER, "wrong")}})
    done = pipeline(
        "cache", "push", tmp_path / "root", f"oci://{logged_in.host}/caches/x", env={"DOCKER_AUTH_CONFIG": wrong}
    )
    assert done.returncode == Exit.PUBLISH and "401" in done.stderr


def test_a_push_that_breaks_off_leaves_no_tag_and_goes_on(faulty, tmp_path, capsys):
    from pipeline.__main__ import main

    cache_samples.write(tmp_path / "root")
    name = f"oci://{faulty.host}/caches/half:one"
    faulty.fail(method="PUT", path="manifests/sha256:", status=403, code="DENIED", message="no")
    assert main(["cache", "push", str(tmp_path / "root"), name]) == Exit.PUBLISH
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        assert registry.resolve("caches/half", "one") is None
    faulty.faults.clear()
    sent = len(faulty.seen)
    assert main(["cache", "push", str(tmp_path / "root"), name]) == 0
    assert [s for s in faulty.seen[sent:] if "/uploads/" in s.path] == []  # the blobs are there already
    capsys.readouterr()
