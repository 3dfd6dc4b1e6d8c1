"""Caches inside images of a real engine: explained, listed, compared and exported, and refused when damaged."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from own_images import OWN

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

import cache_samples as samples  # noqa: E402 - lies beside the unit tests

from pipeline.cache.integrity import check_root  # noqa: E402
from pipeline.contract.places import CACHE_FILE, CACHE_ROOT, MANIFEST_FILE  # noqa: E402

pytestmark = pytest.mark.engine
NAME = f"{OWN}/caches"


@pytest.fixture
def ask(engine):
    import os

    def run(*words):
        env = {**os.environ, "DOCKER_HOST": engine.host}
        command = [sys.executable, "-m", "pipeline", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=900)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def image(client):
    """Make an image of one layer from a directory and further tar members; it has no command and never runs."""

    def make(root: Path | None, *more: tarfile.TarInfo, tag="one", changes=()):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            if root is not None:
                archive.add(root, CACHE_ROOT.lstrip("/"))
            else:
                archive.addfile(tarfile.TarInfo("empty"))
            for member in more:
                archive.addfile(member)
        client.api.import_image_from_data(out.getvalue(), repository=NAME, tag=tag, changes=list(changes))
        return f"{NAME}:{tag}"

    return make


def env_file(tmp_path, **change):
    path = tmp_path / "env.json"
    path.write_text(json.dumps({**samples.H200, **change}))
    return path


def test_an_image_of_two_gpus_is_explained_for_each(ask, image, client, tmp_path):
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        samples.write(tmp_path / "root", gpu)
    name = image(tmp_path / "root")
    before = len(client.containers.list(all=True))
    for gpu, code in (("NVIDIA H200", 0), ("NVIDIA H100 80GB HBM3", 0), ("NVIDIA B200", 7)):
        done = ask("explain", name, "--env", env_file(tmp_path, gpu=gpu), "--json")
        assert done.returncode == code, done.stderr
        assert json.loads(done.stdout)["verdict"] == ("ok" if code == 0 else "refused")
        assert len(json.loads(done.stdout)["keys"]) == 2
    assert len(client.containers.list(all=True)) == before


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: (path / CACHE_FILE).write_text("{"), "not JSON"),
        (lambda path: (path / MANIFEST_FILE).unlink(), "cannot read"),
        (lambda path: (path / "stray.json").write_text("{}"), "not in the manifest"),
        (lambda path: path.rename(path.with_name("0" * 64)), "own inputs give the key"),
    ],
)
def test_a_damaged_image_is_refused_and_nothing_is_exported(ask, image, tmp_path, damage, expected):
    damage(samples.write(tmp_path / "root", "NVIDIA H200"))
    name = image(tmp_path / "root")
    done = ask("explain", name, "--env", env_file(tmp_path), "--json")
    assert done.returncode == 7 and expected in json.loads(done.stdout)["because"]
    assert ask("cache", "export", name, "-o", tmp_path / "out").returncode == 7
    assert not (tmp_path / "out").exists()


def test_links_in_an_image_are_refused_by_name(ask, image, tmp_path):
    samples.write(tmp_path / "root", "NVIDIA H200")
    link = tarfile.TarInfo(f"{CACHE_ROOT.lstrip('/')}/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    done = ask("explain", image(tmp_path / "root", link))
    assert done.returncode == 7 and "is a link to /etc/passwd" in done.stderr


def test_an_image_without_a_cache_and_one_that_keeps_it_elsewhere(ask, image, tmp_path):
    done = ask("explain", image(None))
    assert done.returncode == 7 and f"the image has no {CACHE_ROOT}" in done.stderr
    samples.write(tmp_path / "root", "NVIDIA H200")
    done = ask("explain", image(tmp_path / "root", changes=["ENV PIPELINE_AUTOTUNE_CACHE_DIR=/elsewhere"]))
    assert done.returncode == 7 and "the image has no /elsewhere" in done.stderr
    for name, why in (("no-such-image/none", "no such image at"), ("Not A Name", "nor a valid image reference")):
        done = ask("explain", name)
        assert done.returncode == 2 and f"no such path, {'and ' if 'none' in name else ''}{why}" in done.stderr


def test_export_and_diff_and_ls(ask, image, tmp_path):
    samples.write(tmp_path / "one", "NVIDIA H200")
    samples.write(tmp_path / "two", "NVIDIA H200", tactic=9)
    one, two = image(tmp_path / "one", tag="one"), image(tmp_path / "two", tag="two")
    assert ask("cache", "export", one, "-o", tmp_path / "out").returncode == 0
    assert check_root(tmp_path / "out")[1] == ()
    assert ask("cache", "diff", one, tmp_path / "out").returncode == 0
    done = ask("cache", "diff", one, two, "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["differing"] == 3
    assert ask("cache", "merge", one, two, "-o", tmp_path / "merged").returncode == 7
    rows = json.loads(ask("cache", "ls", one, "--json").stdout)
    assert [row["device"] for row in rows] == ["NVIDIA H200"]


def test_a_tuned_image_is_explained_live(built, pipeline):
    """The real record of a real container, the driver's whole path."""
    name = built["image"]
    done = pipeline("explain", name, "--live", "--json")
    assert done.status == 0, done.stderr
    answer = done.json()["keys"][0]
    assert answer["verdict"] == "ok" and answer["entries"] > 10 and answer["notes"] == []
    assert pipeline("explain", name, "--live", "--startup-max-wait", "1").status not in (0, 2)
