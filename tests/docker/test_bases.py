"""Images on somebody's own base, caches that were tuned elsewhere, and caches that are added to an image."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from own_images import OWN, containers

pytestmark = pytest.mark.engine

BASE = f"{OWN}/serving:base"
SMALL = ("--tp", "1", "--buckets", "1,4", "--ops", "qkv", "--compare", "off")


def commit(client: Any, image: str, script: str, name: str, changes: list[str]) -> None:
    container = client.containers.create(image, ["sh", "-c", script], entrypoint=[], user="0:0")
    try:
        container.start()
        assert container.wait()["StatusCode"] == 0
        container.commit(*name.split(":"), changes=changes)
    finally:
        container.remove(force=True)


@pytest.fixture(scope="module")
def serving(client: Any, built: dict[str, Any]) -> str:
    """A serving image: torch and FlashInfer inside, its own user, entry point, labels, environment and workdir, whose
    /opt is a link to a folder of another mode. In its workdir lies a `pipeline` of its own.
    """
    script = (
        "rm -rf /opt/flashinfer_autotune_cache /opt/pipeline && mkdir -p /srv/pipeline /data && "
        "echo 'raise SystemExit(7)' > /srv/pipeline/__init__.py && "
        "mv /opt /data/opt && chmod 1771 /data && chmod 0711 /data/opt && ln -s data/opt /opt"
    )
    changes = [
        "USER 1234:1234", "WORKDIR /srv", 'ENTRYPOINT ["/bin/echo", "serving"]', 'CMD ["with", "defaults"]',
        "LABEL theirs=kept org.opencontainers.image.title=Theirs org.opencontainers.image.version=9", "ENV THEIRS=kept",
        "ENV PIPELINE_TUNED_CACHE= PIPELINE_AUTOTUNE_CACHE_DIR=",
    ]  # fmt: skip
    commit(client, built["image_id"], script, BASE, changes)
    return BASE


def test_on_top_of_a_serving_image_only_our_layers_are_added_and_all_of_its_own_survives(
    serving: str, pipeline: Any, client: Any
) -> None:
    name = f"{OWN}/ontop:tuned"
    done = pipeline("build", "tiny", *SMALL, "--base-image", serving, "--image", name, "--json")
    assert done.status == 0, done.stderr
    assert done.json()["verdict"]["level"] == "replay"
    base, made = client.images.get(serving), client.images.get(name)
    below = base.attrs["RootFS"]["Layers"]
    assert made.attrs["RootFS"]["Layers"][: len(below)] == below
    config = made.attrs["Config"]
    assert (config["User"], config["WorkingDir"]) == ("1234:1234", "/srv")
    assert config["Labels"]["theirs"] == "kept" and "THEIRS=kept" in config["Env"]
    assert config["Labels"]["org.opencontainers.image.title"] == "Theirs"
    assert config["Labels"]["org.opencontainers.image.version"] == "9"
    assert config["Entrypoint"][0].endswith("pipeline-run")
    said = client.containers.run(name, network_mode="none", remove=True, stderr=False)
    assert said.decode().strip() == "serving with defaults"
    look = ["sh", "-c", "stat -c '%a %U' /data /data/opt; readlink /opt; ls /opt/flashinfer_autotune_cache"]
    said = client.containers.run(name, look, entrypoint=[], user="0:0", network_mode="none", remove=True)
    assert said.decode().splitlines()[:3] == ["1771 root", "711 root", "data/opt"]


@pytest.fixture(scope="module")
def roots(pipeline: Any, serving: str) -> tuple[Path, Path]:
    """Two small caches of this processor, tuned on the serving image."""
    found = []
    for buckets in ("1,2", "1,4"):
        done = pipeline("tune", "tiny", *SMALL, "--buckets", buckets, "--base-image", serving, "--json")
        assert done.status == 0, done.stderr
        found.append(Path(done.json()["root"]))
    return found[0], found[1]


def of_another_processor(root: Path, place: Path) -> Path:
    """The same cache as another processor would have made it."""
    from pipeline.contract.manifest import Manifest

    (old,) = root.glob("*/*/*/manifest.json")
    value = json.loads(old.read_text())
    value["record"]["host"]["cpu"]["model"] = "Some Other Processor"
    value["key"] = str(Manifest.from_json(value).expected_key())
    shutil.copytree(old.parent, place / value["key"])
    (place / value["key"] / "manifest.json").write_text(json.dumps(value, indent=2))
    return place


def test_several_caches_become_a_layer_each_and_more_are_added(
    roots: tuple[Path, Path], serving: str, pipeline: Any, client: Any, tmp_path: Path
) -> None:
    name, more = f"{OWN}/ontop:imported", f"{OWN}/ontop:more"
    done = pipeline("build", "tiny", "--base-image", serving, "--cache", str(roots[0]), "--image", name, "--json")
    assert done.status == 0, done.stderr
    added = pipeline("cache", "add", name, str(roots[1]), "--image", more, "--json")
    assert added.status == 0, added.stderr
    twice = pipeline("cache", "add", more, str(roots[1]))
    assert twice.status == 2 and "already" in twice.stderr
    one, two = (client.images.get(image) for image in (name, more))
    assert two.attrs["RootFS"]["Layers"][:-1] == one.attrs["RootFS"]["Layers"]
    assert two.attrs["Config"]["User"] == "1234:1234"
    assert len(two.labels["io.github.tuned-image-pipeline.key"].split(",")) == 2 == len(added.json()["keys"])
    assert "PIPELINE_TUNED_CACHE=" in two.attrs["Config"]["Env"], "several keys: pipeline-run chooses"


def test_a_key_of_another_device_is_baked_static_and_says_so(
    roots: tuple[Path, Path], serving: str, pipeline: Any, client: Any, tmp_path: Path
) -> None:
    """A CPU key from another processor stands for a GPU that is not here: baked, not replayed, named -unverified."""
    other = of_another_processor(roots[0], tmp_path / "other")
    name = f"{OWN}/ontop:elsewhere"
    done = pipeline("build", "tiny", "--base-image", serving, "--cache", str(other), "--image", name, "--json")
    assert done.status == 0, done.stderr
    assert "NOT REPLAYED: no Some Other Processor here" in done.stderr
    assert (done.json()["image"], done.json()["verdict"]["level"]) == (f"{name}-unverified", "static")


CUBLAS = "int cublasGetProperty(int what, int *value) { *value = what == 0 ? 13 : what == 1 ? 9 : 1; return 0; }"


def test_a_base_whose_loader_finds_another_library_is_refused_with_the_path(
    roots: tuple[Path, Path], serving: str, pipeline: Any, client: Any, tmp_path: Path
) -> None:
    """A cuBLAS on LD_LIBRARY_PATH, as a devel base has one: other versions than those of the tuning."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    from pipeline.image.containers import tar_of

    (tmp_path / "cuda").mkdir()
    (tmp_path / "cublas.c").write_text(CUBLAS)
    library = tmp_path / "cuda" / "libcublas.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cublas.c"], check=True)
    container = client.containers.create(serving, ["true"], user="0:0")
    container.put_archive("/usr/local", tar_of({"cuda": tmp_path / "cuda"}))
    container.commit(f"{OWN}/serving", "devel", changes=["ENV LD_LIBRARY_PATH=/usr/local/cuda"])
    container.remove(force=True)
    name = f"{OWN}/ontop:devel"
    words = ("build", "tiny", "--base-image", f"{OWN}/serving:devel", "--image", name, "--cache")
    elsewhere = pipeline(*words, str(of_another_processor(roots[0], tmp_path / "other")))
    here = pipeline(*words, str(roots[0]))
    for done in (elsewhere, here):
        assert done.status == 7 and "cublas_version" in done.stderr and "13.9.1" in done.stderr, done.stderr
    assert "the loader finds /usr/local/cuda/libcublas.so in this image" in elsewhere.stderr
    assert not [tag for image in client.images.list() for tag in image.tags if tag.startswith(name)]


def test_a_base_without_python_leaves_no_container(pipeline: Any, client: Any, home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    client.api.import_image(src=str(_tar(tmp_path)), repository=f"{OWN}/nothing", tag="x")
    done = pipeline("build", "tiny", *SMALL, "--base-image", f"{OWN}/nothing:x")
    assert done.status == 2 and "has no python3" in done.stderr
    assert containers(client, home) == []


def _tar(tmp_path: Path) -> Path:
    import tarfile

    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "empty", arcname="empty")
    return tmp_path / "x.tar"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--cache", "/no/such/dir"), 2, "is not a directory"),
        (("--cache", "/tmp", "--retune"), 2, "asked to tune"),
        (("--device", "cuda", "--arch", "90a", "--tp", "1"), 2, "offers no GPU"),
        (("--base-image", "no-such-image:here"), 5, "cannot be pulled"),
        (("--base-image", "NOT A REF"), 2, "not an image reference"),
        (("--image", "Bad Name"), 2, "cannot name an image"),
        (("--previous", "/no/such/dir"), 2, "is not a directory"),
        (("--server", "vllm", "--device", "cuda"), 2, "the image that will serve"),
        (("--server", "vllm", "--base-image", "x", "--strategy", "leader"), 2, "--strategy does not apply"),
        (("--server-args", "--tp 2"), 2, "need SERVER="),
    ],
)
def test_bad_settings_are_one_line_with_a_hint(words: tuple[str, ...], status: int, said: str, pipeline: Any) -> None:
    done = pipeline("build", "tiny", *words)
    assert done.status == status, done.stderr
    assert said in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr
