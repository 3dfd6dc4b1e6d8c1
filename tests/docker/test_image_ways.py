"""The other ways to a tuned image: on top of an image that has FlashInfer, in a container, imported, several keys."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

BASE = "tuned-test/serving:base"
SMALL = ("--tp", "1", "--buckets", "1,4", "--ops", "qkv", "--judge", "off")


@pytest.fixture(scope="module")
def serving(client: Any, built: dict[str, Any]) -> Iterator[str]:
    """Somebody's serving image: torch and FlashInfer inside, with its own user, entry point, label and environment.

    In its working directory lies a `pipeline` that is theirs, where `python3 -m` looks first.
    """
    make = (
        "rm -rf /opt/flashinfer_autotune_cache && mkdir -p /srv/pipeline && "
        "echo 'raise SystemExit(7)' > /srv/pipeline/__init__.py"
    )
    container = client.containers.create(built["image_id"], ["sh", "-c", make], entrypoint=[], user="0:0")
    try:
        container.start()
        container.wait()
        container.commit(
            "tuned-test/serving",
            "base",
            changes=[
                "USER 1234:1234",
                "WORKDIR /srv",
                'ENTRYPOINT ["/bin/echo", "serving"]',
                'CMD ["with", "defaults"]',
                "LABEL theirs=kept",
                "ENV THEIRS=kept",
            ],
        )
    finally:
        container.remove(force=True)
    yield BASE
    client.images.remove(BASE, force=True)


@pytest.mark.parametrize("way", ["stage", "container"])
def test_on_top_of_a_serving_image_only_our_layers_are_added(
    way: str, serving: str, pipeline: Any, client: Any
) -> None:
    name = f"tuned-test/ontop:{way}"
    done = pipeline(
        "image", "tiny", *SMALL, "--base-image", serving, "--tune-in", way, "--image", name, "--retune", "--json"
    )
    assert done.status == 0, done.stderr
    try:
        outcome = json.loads(done.stdout)
        assert outcome["verdict"]["level"] == "replay"
        assert f"tune in: {way}" in done.stderr
        assert "fetch the wheels" not in done.stderr
        base, made = client.images.get(serving), client.images.get(name)
        below = base.attrs["RootFS"]["Layers"]
        assert made.attrs["RootFS"]["Layers"][: len(below)] == below
        config = made.attrs["Config"]
        assert (config["User"], config["WorkingDir"]) == ("1234:1234", "/srv")
        assert config["Labels"]["theirs"] == "kept"
        assert "THEIRS=kept" in config["Env"]
        assert config["Entrypoint"][0].endswith("pipeline-run")
        said = client.containers.run(name, network_mode="none", remove=True, stderr=False)
        assert said.decode().strip() == "serving with defaults"
    finally:
        client.images.remove(name, force=True)


def test_the_classic_builder_tunes_in_a_run_step_too(
    serving: str, engine: Any, client: Any, tmp_path: Path, plan_of: Any
) -> None:
    """The form for engines whose default runtime is nvidia; without one it runs the same step on CPU ranks."""
    if engine.containerd_store:
        pytest.skip("the classic builder belongs to the classic image store")
    from pipeline.cache.store import check_root
    from pipeline.contract.plan import OpPlan
    from pipeline.image.contexts import stage_plan
    from pipeline.image.fill import ClassicFiller
    from pipeline.image.unfinished import Unfinished

    float32 = {"a": "float32", "b": "float32", "out": "float32"}
    op = OpPlan("qkv", "cpu_mm", {"n": 64, "k": 64}, float32, (1, 4))
    plan = plan_of("small", op)
    from pipeline.image.fill import _folder

    container = client.containers.create(serving, ["true"], user="0:0")
    try:
        container.put_archive("/opt", _folder(stage_plan(plan, tmp_path / "plan") / "opt" / "tuning", "tuning"))
        container.commit("tuned-test/serving", "tuner")
    finally:
        container.remove(force=True)
    try:
        (tmp_path / "previous").mkdir()
        before = {image.id for image in client.images.list()}
        unfinished = Unfinished(tmp_path / "unfinished" / "digest")
        options = ("--timeout", "60")
        filler = ClassicFiller(client, "tuned-test/serving:tuner", tmp_path / "previous", options, unfinished)
        filler.fill(tmp_path / "out")
        tree, findings = check_root(tmp_path / "out" / "opt" / "flashinfer_autotune_cache")
        assert [str(f) for f in findings] == []
        assert len(tree.keys) == 1
        assert {image.id for image in client.images.list()} == before
    finally:
        client.images.remove("tuned-test/serving:tuner", force=True)


@pytest.fixture(scope="module")
def roots(pipeline: Any, serving: str) -> tuple[Path, Path]:
    """Two cache roots with different keys, tuned through the store."""
    made = []
    for buckets in ("1,4", "2,8"):
        words = ("--tp", "1", "--buckets", buckets, "--ops", "qkv", "--judge", "off", "--base-image", serving)
        done = pipeline("tune", "tiny", *words, "--json")
        assert done.status == 0, done.stderr
        made.append(Path(json.loads(done.stdout)["root"]))
    return made[0], made[1]


def test_several_keys_become_a_layer_each(roots: tuple[Path, Path], serving: str, pipeline: Any, client: Any) -> None:
    name = "tuned-test/ontop:two"
    both = ",".join(map(str, roots))
    done = pipeline("build", "tiny", "--base-image", serving, "--cache", both, "--image", name, "--json")
    assert done.status == 0, done.stderr
    try:
        outcome = json.loads(done.stdout)
        assert len(outcome["keys"]) == 2
        from pipeline.image.saved import read_saved

        last = read_saved(client, name, count=2).last
        assert [len(names or ()) for names in last] == [2, 2]
        again = pipeline("verify", name, "--level", "static", "--deep")
        assert again.status == 0, again.stderr
    finally:
        client.images.remove(name, force=True)


def test_the_same_key_with_other_contents_is_refused_with_the_entries(
    roots: tuple[Path, Path], serving: str, pipeline: Any, tmp_path: Path
) -> None:
    import hashlib

    other = tmp_path / "other"
    shutil.copytree(roots[0], other)
    place = next(other.glob("*/*/*"))
    cached = json.loads((place / "autotune_configs.json").read_text())
    manifest = json.loads((place / "manifest.json").read_text())
    row = manifest["covered"][0]
    tactic = ["blas", "nk", 0, 0, 1] if row["tactic"] != ["blas", "nk", 0, 0, 1] else ["blas", "kn", 0, 0, 1]
    row["tactic"] = cached[row["entry"]][1] = tactic
    data = json.dumps(cached).encode()
    manifest["files"]["autotune_configs.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / "autotune_configs.json").write_bytes(data)
    (place / "manifest.json").write_text(json.dumps(manifest))
    done = pipeline(
        "image", "tiny", "--base-image", serving, "--cache", f"{roots[0]},{other}", "--image", "tuned-test/x:y"
    )
    assert done.status == 7
    assert "in two roots with different contents" in done.stderr
    assert "cpu_mm" in done.stderr


def of_another_processor(root: Path, other: Path) -> Path:
    """A copy of a root whose key was tuned on a processor that nobody has."""
    from pipeline.contract.manifest import Manifest

    shutil.copytree(root, other)
    place = next(other.glob("*/*/*"))
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["provenance"]["plan"] == manifest["plan"]["digest"]
    assert set(manifest["provenance"]) >= {"base_image_digest", "versions_json", "tuner_image_digest"}
    assert any(path.endswith(".so") for path in manifest["record"]["libraries"].values())
    manifest["record"]["host"]["cpu"]["model"] = "Some Other Processor"
    manifest["key"] = str(Manifest.from_json({**manifest}).expected_key())
    (place / "manifest.json").write_text(json.dumps(manifest))
    place.rename(place.parent / manifest["key"].rpartition("/")[2])
    return other


CUBLAS = "int cublasGetProperty(int what, int *value) { *value = what == 0 ? 13 : what == 1 ? 9 : 1; return 0; }"


def test_a_base_whose_loader_finds_another_library_is_refused_with_the_path(
    roots: tuple[Path, Path], serving: str, pipeline: Any, client: Any, tmp_path: Path
) -> None:
    """A cuBLAS on LD_LIBRARY_PATH, as a devel base has one: the image half differs from that of the stage that tuned."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    from pipeline.image.fill import _folder

    (tmp_path / "cuda").mkdir()
    (tmp_path / "cublas.c").write_text(CUBLAS)
    library = tmp_path / "cuda" / "libcublas.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cublas.c"], check=True)
    container = client.containers.create(serving, ["true"], user="0:0")
    try:
        container.put_archive("/usr/local", _folder(tmp_path / "cuda", "cuda"))
        container.commit("tuned-test/serving", "devel", changes=["ENV LD_LIBRARY_PATH=/usr/local/cuda"])
    finally:
        container.remove(force=True)
    name = "tuned-test/ontop:devel"
    words = ("image", "tiny", "--base-image", "tuned-test/serving:devel", "--image", name, "--cache")
    try:
        elsewhere = pipeline(*words, str(of_another_processor(roots[0], tmp_path / "other")))
        here = pipeline(*words, str(roots[0]))
    finally:
        client.images.remove("tuned-test/serving:devel", force=True)
    for done in (elsewhere, here):
        assert done.status == 7, done.stderr
        assert "cublas_version" in done.stderr and "13.9.1" in done.stderr
    assert "the loader finds /usr/local/cuda/libcublas.so in this image" in elsewhere.stderr
    assert not [tag for image in client.images.list() for tag in image.tags if tag.startswith(name)]


def test_a_key_of_another_device_is_baked_static_and_says_so(
    roots: tuple[Path, Path], serving: str, pipeline: Any, client: Any, tmp_path: Path
) -> None:
    """A CPU key from another processor stands for a GPU that is not here: baked, not replayed, named -unverified."""
    other = of_another_processor(roots[0], tmp_path / "other")
    name = "tuned-test/ontop:elsewhere"
    done = pipeline("build", "tiny", "--base-image", serving, "--cache", str(other), "--image", name, "--json")
    assert done.status == 0, done.stderr
    try:
        assert "NOT REPLAYED: no Some Other Processor here" in done.stderr
        assert "compare the image half of the record" in done.stderr
        outcome = json.loads(done.stdout)
        assert outcome["image"] == f"{name}-unverified"
        assert outcome["verdict"]["level"] == "static"
        required = client.containers.create(
            f"{name}-unverified", environment={"PIPELINE_REQUIRE_TUNED": "1"}, network_mode="none"
        )
        required.start()
        assert required.wait(timeout=600)["StatusCode"] == 7
        required.remove(force=True)
    finally:
        client.images.remove(f"{name}-unverified", force=True)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--cache", "/no/such/dir"), 2, "is not a directory"),
        (("--tune-in", "import"), 2, "needs CACHE="),
        (("--cache", "/tmp", "--retune"), 2, "asked to tune"),
        (("--device", "cuda", "--arch", "90a", "--tp", "1"), 2, "offers no GPU"),
        (("--base-image", "no-such-image:here"), 5, "cannot be pulled"),
        (("--base-image", "NOT A REF"), 2, "not an image reference"),
        (("--image", "Bad Name"), 2, "cannot name an image"),
        (("--previous", "/no/such/dir"), 2, "is not a directory"),
    ],
)
def test_bad_settings_are_one_line_with_a_hint(words: tuple[str, ...], status: int, said: str, pipeline: Any) -> None:
    done = pipeline("build", "tiny", *words)
    assert done.status == status, done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
