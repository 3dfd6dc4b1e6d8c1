"""`pipeline build tiny` on a real engine, as a user runs it, and what a container of the image gets."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from own_images import NAME, OWN, containers

from pipeline.daemon.private import folders

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
ANYBODY = "65532:65532"
SMALL = ("--tp", "1", "--buckets", "1,4", "--ops", "qkv", "--compare", "off")
CACHE = "/opt/flashinfer_autotune_cache"


def read_file(client: Any, image: str, path: str) -> bytes:
    container = client.containers.create(image, ["true"])
    try:
        chunks, _ = container.get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            stream = tar.extractfile(tar.getmembers()[0])
            assert stream is not None
            return stream.read()
    finally:
        container.remove(force=True)


def start(client: Any, command: list[str], **options: Any) -> tuple[int, str, str]:
    container = client.containers.create(NAME, command, network_mode="none", **options)
    try:
        container.start()
        status = container.wait(timeout=600)["StatusCode"]
        out, err = (container.logs(stdout=one, stderr=not one).decode() for one in (True, False))
        return status, out, err
    finally:
        container.remove(force=True)


def test_every_op_is_replayed_without_a_miss_by_three_users_and_the_last_layer_is_the_cache(
    built: dict[str, Any], client: Any
) -> None:
    verdict = built["verdict"]
    assert (verdict["level"], verdict["result"], built["reused"]) == ("replay", "pass", False)
    assert verdict["checks"]["hits"] == verdict["checks"]["replayed calls"] > 0
    for who in ("as root", "as another user", "as read-only root"):
        assert who in built["stderr"]
    image = client.images.get(NAME)
    assert image.attrs["RootFS"]["Layers"][-1] == built["cache_diff_id"]
    manifest = json.loads(read_file(client, NAME, f"{CACHE}/{built['key']}/manifest.json"))
    assert [rank["rank"] for rank in manifest["ranks"]] == [0, 1] and manifest["strategy"] == "synchronized"
    assert manifest["provenance"]["variable PIPELINE_TUNED_CACHE"].startswith(f"{CACHE}/{built['key']}/")
    labels = image.labels
    assert labels["io.github.tuned-image-pipeline.key"] == built["key"]
    assert labels["io.github.tuned-image-pipeline.manifest"] == verdict["manifest_sha256"]
    assert "PIPELINE_TUNED_CACHE" in labels["io.github.tuned-image-pipeline.environment"]


def test_the_image_is_lean_and_has_nothing_of_ours_on_python_s_path(built: dict[str, Any], client: Any) -> None:
    size = client.images.get(NAME).attrs["Size"]
    assert 100e6 < size < 1000e6
    look = (
        "import importlib.util, os, sys; print([importlib.util.find_spec(n) for n in ('pipeline', 'pipeline.tune')"
        " if n == 'pipeline'], os.environ.get('PYTHONPATH'), os.path.exists('/tuner'),"
        " sorted(os.listdir('/opt/pipeline/lib/pipeline')))"
    )
    status, out, _ = start(client, ["-c", look], entrypoint=["python3"])  # the image as it is: a start leaves bytecode
    assert status == 0
    assert out.strip() == "[None] None False ['__init__.py', 'cache', 'contract', 'flashinfer', 'start']"
    _, out, _ = start(client, ["find", "/opt/venv", "-path", "*/flashinfer/*", "-name", "*.cu*"])
    assert out == ""


def test_the_entry_point_logs_one_line_and_becomes_the_command(built: dict[str, Any], client: Any) -> None:
    status, out, err = start(client, ["sh", "-c", "echo pid $$; echo $PIPELINE_TUNED_CACHE; exit 41"])
    assert status == 41
    assert out.splitlines() == ["pid 1", f"{CACHE}/{built['key']}/autotune_configs.json"]
    assert err.startswith(f"tuned cache: {built['entries']} entries for ") and len(err.splitlines()) == 1
    status, out, err = start(
        client, ["sh", "-c", "echo $FLASHINFER_WORKSPACE_BASE"], user=ANYBODY, read_only=True, tmpfs={"/tmp": ""}
    )
    assert status == 0 and out.strip() and f"{built['entries']} entries" in err


def test_a_start_that_requires_a_tuned_cache_ends_before_the_command(built: dict[str, Any], client: Any) -> None:
    environment = {"PIPELINE_REQUIRE_TUNED": "1", "PIPELINE_AUTOTUNE_CACHE_DIR": "/nowhere"}
    status, out, err = start(client, ["echo", "started"], environment=environment)
    assert (status, out) == (7, "") and "PIPELINE_REQUIRE_TUNED" in err and "Traceback" not in err


def test_a_command_that_replaces_the_entry_point_still_finds_the_cache(built: dict[str, Any], client: Any) -> None:
    """As `command:` of Kubernetes, or `docker run --entrypoint`."""
    look = "import json, os; print(len(json.load(open(os.environ['PIPELINE_TUNED_CACHE']))) > 1)"
    status, out, _ = start(client, ["-c", look], entrypoint=["python3"], user=ANYBODY)
    assert (status, out.strip()) == (0, "True")


def test_built_again_nothing_is_tuned_and_one_build_is_asked_for(built: dict[str, Any], pipeline: Any) -> None:
    done = pipeline("build", "tiny", "--tp", "2", "--image", NAME, "--json")
    assert done.status == 0, done.stderr
    again = done.json()
    assert again["reused"] is True and again["identity"] == built["identity"]
    builds = [line for line in Path(again["log"]).read_text().splitlines() if line.startswith("+ docker buildx build")]
    assert len(builds) == 1 and "--target final" in builds[0]


def test_rebuilt_without_the_builder_s_cache_the_image_is_the_same(
    built: dict[str, Any], engine: Any, pipeline: Any
) -> None:
    subprocess.run(
        ["docker", "buildx", "prune", "--force", "--all", "--filter", "type=regular"],
        env={**os.environ, "DOCKER_HOST": engine.host}, check=True, capture_output=True,
    )  # fmt: skip
    done = pipeline("build", "tiny", "--tp", "2", "--image", f"{OWN}/tiny:anew", "--json", timeout=1500)
    assert done.status == 0, done.stderr
    assert done.json()["identity"] == built["identity"]


def test_verify_agrees_and_what_cannot_be_verified_is_refused(
    built: dict[str, Any], pipeline: Any, client: Any
) -> None:
    done = pipeline("verify", NAME, "--level", "static", "--json")
    assert done.status == 0, done.stderr
    assert done.json()["identity"] == built["identity"]
    gone = pipeline("verify", "no-such/image:x")
    assert gone.status == 2 and "there is no image no-such/image:x" in gone.stderr
    bare = pipeline("verify", client.images.get(NAME).labels["org.opencontainers.image.base.name"])
    assert bare.status == 7 and "no tuned cache" in bare.stderr


@contextmanager
def changed(client: Any, built: dict[str, Any], tag: str, change: Callable[[Any, Any], None]) -> Iterator[str]:
    """An image like the built one, whose cache holds what `change(entries, manifest)` leaves."""
    place = f"{CACHE}/{built['key']}"
    entries, manifest = (
        json.loads(read_file(client, NAME, f"{place}/{name}")) for name in ("autotune_configs.json", "manifest.json")
    )
    change(entries, manifest)
    data = json.dumps(entries).encode()
    manifest["files"]["autotune_configs.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    container = client.containers.create(NAME, ["true"])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in (("autotune_configs.json", data), ("manifest.json", json.dumps(manifest).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    container.put_archive(place, buffer.getvalue())
    container.commit(f"{OWN}/tiny", tag)
    container.remove(force=True)
    yield f"{OWN}/tiny:{tag}"


def test_an_entry_that_is_missing_fails_with_exit_7_and_is_named(
    built: dict[str, Any], pipeline: Any, client: Any
) -> None:
    gone: list[str] = []

    def delete_one(entries: Any, manifest: Any) -> None:
        gone.append(manifest["covered"][3]["entry"])
        del entries[gone[0]]

    with changed(client, built, "deleted", delete_one) as image:
        done = pipeline("verify", image)
    assert done.status == 7 and gone[0][:60] in done.stderr and "Traceback" not in done.stderr


def test_a_damaged_store_entry_is_tuned_again(pipeline: Any, home: Path, client: Any, built: dict[str, Any]) -> None:
    words = ("build", "tiny", *SMALL, "--image", f"{OWN}/tiny:damaged", "--json")
    first = pipeline(*words)
    assert first.status == 0, first.stderr
    (entry,) = (home / "tuned-image-pipeline" / "warm-ups").glob(f"{first.json()['inputs']}/warmup.json")
    entry.write_text("{")
    again = pipeline(*words)
    assert again.status == 0, again.stderr
    assert "damaged" in again.stderr and again.json()["reused"] is False


def test_only_the_plan_changed_no_layer_below_is_built_again(built: dict[str, Any], pipeline: Any, client: Any) -> None:
    done = pipeline("build", "tiny", *SMALL, "--image", f"{OWN}/tiny:one", "--json")
    assert done.status == 0, done.stderr
    one, two = (client.images.get(name).attrs["RootFS"]["Layers"] for name in (NAME, f"{OWN}/tiny:one"))
    assert one[:-1] == two[:-1] and one[-1] != two[-1]
    small = client.images.get(f"{OWN}/tiny:one")
    small.tag(f"{OWN}/tiny", "kept")
    moved = pipeline("build", "tiny", "--tp", "2", "--image", f"{OWN}/tiny:one", "--json")
    assert moved.status == 0, moved.stderr
    assert client.images.get(f"{OWN}/tiny:one").id == client.images.get(NAME).id
    assert client.images.get(f"{OWN}/tiny:kept").id == small.id, "a name that moves on leaves the image its others"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("step", ["importing torch", "replay on"])
def test_an_interrupted_build_leaves_no_name_and_what_it_left_goes_with_the_next_run(
    sign: signal.Signals, step: str, engine: Any, client: Any, home: Path, built: dict[str, Any], pipeline: Any
) -> None:
    name = f"{OWN}/tiny:interrupted"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "build", "tiny", *SMALL, "--retune", "--image", name],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if step in line:
            process.send_signal(sign)
            break
    if sign == signal.SIGKILL:
        process.stderr.close()
        assert process.wait(60) == -signal.SIGKILL
        done = pipeline("verify", NAME, "--level", "static")
        assert done.status == 0, done.stderr
    else:
        said += process.stderr.readlines()
        process.stderr.close()
        assert process.wait(timeout=600) == 130, "".join(said)
        assert "Traceback" not in "".join(said)
    runs = {log.stem.rpartition("-")[2] for log in (home / "tuned-image-pipeline" / "logs").glob("*.log")}
    tags = [tag for image in client.images.list() for tag in image.tags]
    assert name not in tags
    assert not [tag for tag in tags if "/unnamed:" in tag and tag.rpartition(":")[2][:6] in runs]
    assert containers(client, home) == []


def test_two_runs_at_once_wait_for_each_other_and_both_end_well(
    engine: Any, client: Any, home: Path, built: dict[str, Any]
) -> None:
    words = [sys.executable, "-m", "pipeline", "build", "tiny", *SMALL, "--retune", "--image", f"{OWN}/tiny:twice"]
    env = {**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home)}
    both = [
        subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    said = [one.communicate(timeout=1200)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert any("which uses the CPU" in text for text in said), "the second says who it waits for"
    assert client.images.get(f"{OWN}/tiny:twice")


def test_a_failure_of_the_ranks_comes_back_and_is_never_cached(
    engine: Any, home: Path, monkeypatch: pytest.MonkeyPatch, client: Any, plan_of: Any
) -> None:
    """An op that no adapter knows fails on every rank; the container itself ends with 0, and the next attempt runs."""
    from pipeline.contract.errors import PipelineError
    from pipeline.contract.plan import OpPlan
    from pipeline.image.request import Request
    from pipeline.image.road import build_image

    monkeypatch.setenv("DOCKER_HOST", engine.host)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    op = OpPlan("qkv", "no_such_op", {"n": 8, "k": 8}, {"a": "float32", "b": "float32", "out": "float32"}, (1, 2))
    plan = plan_of("broken", op)
    request = Request(ROOT, "broken", plan, lambda _target, _version: plan, image=f"{OWN}/tiny:broken")
    for _ in range(2):
        with pytest.raises(PipelineError, match="no_such_op") as caught:
            build_image(request)
        assert int(caught.value.exit_code) in (2, 6) and Path(caught.value.log).is_file()


def test_a_tuning_that_was_ended_in_the_middle_is_resumed(
    pipeline: Any, engine: Any, client: Any, home: Path, built: dict[str, Any]
) -> None:
    words = ["tiny", "--tp", "2", "--max-tokens", "512", "--seed", "502"]
    environment = {**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-m", "pipeline", "tune", *words]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "2/3 tuning" in line:
                break
        (ours,) = containers(client, home)
        ours.kill()
        said = process.stderr.read()
        assert process.wait(600) == 6, said
    assert "the tuning container ended with 137: ended by SIGKILL" in said and "resumes" in said
    done = pipeline("tune", *words, "--json")
    assert done.status == 0, done.stderr
    assert "1/3 tuning" not in done.stderr and "3/3 tuning" in done.stderr
    assert not list((home / "tuned-image-pipeline" / "unfinished").glob("*/*"))


def test_clean_says_what_goes_and_removes_it(built: dict[str, Any], pipeline: Any, home: Path) -> None:
    """Without an engine, whose tuner images another run of these tests may use: a private one that is down."""
    down = {"DOCKER_HOST": folders(home / "tuned-image-pipeline").host}
    told = pipeline("clean", "--days", "0", "--dry-run", env=down)
    assert told.status == 0 and "contexts: " in told.stdout
    done = pipeline("clean", "--days", "0", env=down)
    assert done.status == 0, done.stderr
    assert not list((home / "tuned-image-pipeline" / "contexts").glob("code-*"))
    assert list((home / "tuned-image-pipeline" / "warm-ups").iterdir()), "the store is not clean's"


def test_what_is_installed_is_listed_for_the_sbom(built: dict[str, Any], client: Any, home: Path) -> None:
    from pipeline.release.sbom import installed

    def run(words: Any) -> str:
        return client.containers.run(NAME, list(words), entrypoint=[], network_mode="none", remove=True).decode()

    packages = {one.name: one for one in installed(run, home / "tuned-image-pipeline" / "wheels")}
    assert packages["torch"].version.startswith("2.") and "flashinfer-python" in packages


def test_the_report_is_made_again_from_what_the_image_holds(
    built: dict[str, Any], pipeline: Any, home: Path, tmp_path: Path
) -> None:
    """The build wrote one and said how to run the image; elsewhere the image and its verdict are enough."""
    assert f"docker run --rm {NAME} env" in built["stderr"] and "containers:" in built["stderr"]
    assert str(home / "tuned-image-pipeline" / "reports" / f"{OWN}-tiny-two.html") in built["stderr"]
    (tmp_path / "verdict.json").write_text(json.dumps(built["verdict"]))
    words = ("report", NAME, "-o", str(tmp_path / "other.html"), "--verdict", str(tmp_path / "verdict.json"))
    done = pipeline(*words, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.status == 0, done.stderr
    text = (tmp_path / "other.html").read_text()
    assert "fresh containers on" in text and built["identity"] in text and built["cache_diff_id"][:19] in text
    assert "The steps of its build are not known on this host" in text
    changed = {**built["verdict"], "identity": f"sha256:{'0' * 64}"}
    (tmp_path / "verdict.json").write_text(json.dumps(changed))
    done = pipeline(*words)
    assert done.status == 7 and "is on another image" in done.stderr
