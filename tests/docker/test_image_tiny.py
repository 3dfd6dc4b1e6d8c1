"""`pipeline build tiny` on a real engine, as a user runs it: two ranks tune inside the build, the image is verified."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "tuned-test/tiny:two"
ANYBODY = "65532:65532"
SMALL = ("--tp", "2", "--buckets", "1,4", "--ops", "qkv", "--judge", "off")

pytestmark = pytest.mark.engine


def test_the_image_is_tuned_by_two_ranks_and_replayed_without_a_miss(built: dict[str, Any], client: Any) -> None:
    assert built["ranks"] == 2
    assert built["entries"] > 10
    assert built["reused"] is False
    assert built["verdict"]["level"] == "replay"
    assert built["verdict"]["result"] == "pass"
    checks = built["verdict"]["checks"]
    assert checks["replayed calls"] == checks["hits"] > 100
    assert client.images.get(NAME).id == built["image_id"]
    assert built["verdict"]["config_digest"] == built["config_digest"]
    for word in ("tune on 2 ranks in lock-step", "docker run", "op × bucket pairs", "CPU ranks"):
        assert word in built["stderr"]


def test_the_last_layer_holds_the_cache_and_nothing_else(built: dict[str, Any], client: Any) -> None:
    from pipeline.image.saved import read_saved

    saved = read_saved(client, NAME)
    place = f"opt/flashinfer_autotune_cache/{built['key']}"
    assert sorted(saved.last[0] or ()) == [f"{place}/autotune_configs.json", f"{place}/manifest.json"]
    assert saved.config_digest == built["config_digest"]
    assert saved.diff_ids[-1] == built["cache_diff_id"]


def test_the_manifest_says_how_the_ranks_agreed(built: dict[str, Any], client: Any) -> None:
    manifest = json.loads(read_file(client, NAME, f"/opt/flashinfer_autotune_cache/{built['key']}/manifest.json"))
    assert [rank["rank"] for rank in manifest["ranks"]] == [0, 1]
    assert len({rank["entries"] for rank in manifest["ranks"]}) == 1
    assert manifest["strategy"] == "synchronized"
    assert manifest["substitutions"]  # the CPU shim lists itself
    cached = json.loads(read_file(client, NAME, f"/opt/flashinfer_autotune_cache/{built['key']}/autotune_configs.json"))
    assert cached["_metadata"]["flashinfer_version"] == manifest["plan"]["flashinfer_version"]
    assert all(row["candidates"] > 1 for row in manifest["covered"])
    # On a busy CPU the default may be the surest choice everywhere; each choice must be what its reason says.
    for row in manifest["covered"]:
        default = (row["runner"], row["tactic"]) == ("CpuWholeRunner", -1)
        assert row["decided_by"] in ({"default"} if default else {"faster", "tie"}), row
        assert 0 < row["time_ms"] <= row["default_ms"], row
        assert row["ratio"] == 1 if default else row["ratio"] + row["spread"] < 1, row


def test_the_image_is_labelled_with_its_key(built: dict[str, Any], client: Any) -> None:
    labels = client.images.get(NAME).labels
    assert labels["io.github.tuned-image-pipeline.key"] == built["key"]
    assert labels["io.github.tuned-image-pipeline.manifest"] == built["verdict"]["manifest_sha256"]


def test_it_stays_under_a_gigabyte_and_holds_no_cuda_source(built: dict[str, Any], engine: Any, client: Any) -> None:
    if engine.containerd_store:
        assert built["size_bytes"] < 400e6  # that store tells compressed bytes
    else:
        assert 100e6 < built["size_bytes"] < 1000e6
    look = ["find", "/opt/venv", "-path", "*/flashinfer/*", "-name", "*.cu*"]
    assert client.containers.run(NAME, look, network_mode="none", remove=True).decode() == ""


def test_another_user_can_read_the_cache(built: dict[str, Any], client: Any) -> None:
    output = client.containers.run(
        NAME, ["cat", f"/opt/flashinfer_autotune_cache/{built['key']}/manifest.json"], user=ANYBODY, read_only=True,
        network_mode="none", remove=True,
    )  # fmt: skip
    assert json.loads(output)["key"] == built["key"]


def test_built_again_nothing_is_tuned_and_everything_is_cached(built: dict[str, Any], pipeline: Any) -> None:
    done = pipeline("build", "tiny", "--tp", "2", "--image", NAME, "--json")
    assert done.status == 0, done.stderr
    again = done.json()
    assert again["reused"] is True
    assert again["config_digest"] == built["config_digest"]
    assert again["cache_diff_id"] == built["cache_diff_id"]
    assert "tune on" not in done.stderr.replace("tuned on", "")
    log = Path(again["log"]).read_text()
    builds = [line for line in log.splitlines() if line.startswith("+ docker buildx build")]
    assert len(builds) == 1
    assert "CACHED" in log


def test_rebuilt_without_the_builder_s_cache_the_layers_are_the_same(
    built: dict[str, Any], engine: Any, home: Path, tmp_path: Path, stored_root: Any
) -> None:
    """The diff id is the promise: bake the stored cache once more, with nothing taken from the build cache."""
    log = Path(built["log"]).read_text()
    command = next(line for line in log.splitlines() if "--target final" in line)
    stored = stored_root(home, built)
    from pipeline.image.caches import collect
    from pipeline.image.contexts import stage_key

    context = stage_key(collect([stored])[0], tmp_path / "tuned")
    import shlex

    words = shlex.split(command.removeprefix("+ "))
    for at, word in enumerate(words):
        if word.startswith("tuned-"):
            words[at] = f"{word.partition('=')[0]}={context}"
        if word == "--metadata-file":
            words[at + 1] = str(tmp_path / "metadata.json")
    words.insert(3, "--no-cache-filter=final")
    subprocess.run(words, env={**os.environ, "DOCKER_HOST": engine.host}, check=True, capture_output=True)
    told = json.loads((tmp_path / "metadata.json").read_text())
    assert told["containerimage.config.digest"] == built["config_digest"]


def test_verify_says_pass_for_the_finished_image(built: dict[str, Any], pipeline: Any) -> None:
    done = pipeline("verify", NAME, "--json")
    assert done.status == 0, done.stderr
    assert done.json()["config_digest"] == built["config_digest"]
    for who in ("as root", "as another user", "as read-only root"):
        assert who in done.stderr


def with_changed_cache(client: Any, built: dict[str, Any], tag: str, change: Any) -> str:
    """An image like the built one, whose cache layer holds what `change(entries, manifest)` leaves."""
    place = f"/opt/flashinfer_autotune_cache/{built['key']}"
    entries = json.loads(read_file(client, NAME, f"{place}/autotune_configs.json"))
    manifest = json.loads(read_file(client, NAME, f"{place}/manifest.json"))
    change(entries, manifest)
    import hashlib

    data = json.dumps(entries).encode()
    manifest["files"]["autotune_configs.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    container = client.containers.create(NAME, ["true"])
    try:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in (("autotune_configs.json", data), ("manifest.json", json.dumps(manifest).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        container.put_archive(place, buffer.getvalue())
        container.commit("tuned-test/tiny", tag)
    finally:
        container.remove(force=True)
    return f"tuned-test/tiny:{tag}"


def test_an_entry_that_is_missing_fails_with_exit_7_and_is_named(
    built: dict[str, Any], pipeline: Any, client: Any
) -> None:
    gone: list[str] = []

    def delete_one(entries: dict[str, Any], manifest: dict[str, Any]) -> None:
        gone.append(manifest["covered"][3]["entry"])
        del entries[gone[0]]

    image = with_changed_cache(client, built, "deleted", delete_one)
    try:
        done = pipeline("verify", image)
        assert done.status == 7
        assert gone[0] in done.stderr or manifest_names(done.stderr, gone[0])
        assert "Traceback" not in done.stderr
    finally:
        client.images.remove(image, force=True)


def manifest_names(text: str, entry: str) -> bool:
    return entry[:60] in text


def test_the_replay_itself_names_the_op_and_bucket_that_missed(built: dict[str, Any], client: Any) -> None:
    """Without the static look before it: the count inside the real search_cache must see the miss."""
    row: list[dict[str, Any]] = []

    def delete_one(entries: dict[str, Any], manifest: dict[str, Any]) -> None:
        row.append(manifest["covered"][3])
        del entries[row[0]["entry"]]

    image = with_changed_cache(client, built, "missing", delete_one)
    try:
        container = client.containers.create(
            image, ["python3", "-m", "pipeline.tune.replay", "--key", built["key"]], network_mode="none"
        )
        try:
            container.start()
            status = container.wait(timeout=600)["StatusCode"]
            told = json.loads(container.logs(stdout=True, stderr=False).decode().strip().splitlines()[-1])
        finally:
            container.remove(force=True)
        assert status == 7
        assert told["misses"]
        assert row[0]["op"] in json.dumps(told["misses"])
        assert told["hits"] < told["calls"]
    finally:
        client.images.remove(image, force=True)


def test_a_foreign_file_in_the_last_layer_is_found(built: dict[str, Any], pipeline: Any, client: Any) -> None:
    container = client.containers.create(NAME, ["true"])
    try:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("stray")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        container.put_archive("/etc", buffer.getvalue())
        container.commit("tuned-test/tiny", "stray")
    finally:
        container.remove(force=True)
    try:
        done = pipeline("verify", "tuned-test/tiny:stray", "--level", "static")
        assert done.status == 7
        deep = pipeline("verify", "tuned-test/tiny:stray", "--level", "static", "--deep")
        assert deep.status == 7
        assert "/etc/stray" in deep.stderr
    finally:
        client.images.remove("tuned-test/tiny:stray", force=True)


def test_an_image_without_a_cache_and_no_image_at_all(pipeline: Any, client: Any, built: dict[str, Any]) -> None:
    done = pipeline("verify", "no-such/image:x")
    assert done.status == 2
    assert "there is no image no-such/image:x" in done.stderr
    base = client.images.get(NAME).labels["org.opencontainers.image.base.name"]
    bare = pipeline("verify", base)
    assert bare.status == 7
    assert "no tuned cache" in bare.stderr


def test_only_the_plan_changed_no_wheel_is_installed_again(built: dict[str, Any], pipeline: Any, client: Any) -> None:
    words = ("--tp", "1", "--buckets", "1,2,4", "--judge", "off", "--image", "tuned-test/tiny:one", "--json")
    done = pipeline("build", "tiny", *words)
    assert done.status == 0, done.stderr
    outcome = done.json()
    try:
        assert outcome["ranks"] == 1
        assert outcome["reused"] is False
        one, two = (client.images.get(n).attrs["RootFS"]["Layers"] for n in (NAME, "tuned-test/tiny:one"))
        assert one[:-1] == two[:-1]
        assert one[-1] != two[-1]
        assert "pip" not in [line.split()[-1] for line in done.stderr.splitlines() if line.startswith("→")]
        log = Path(outcome["log"]).read_text()
        assert log.count("CACHED") >= 2
    finally:
        client.images.remove("tuned-test/tiny:one", force=True)


def test_an_earlier_cache_is_taken_up_and_recorded(
    built: dict[str, Any], pipeline: Any, client: Any, home: Path, tmp_path: Path, stored_root: Any
) -> None:
    stored = stored_root(home, built)
    previous = tmp_path / "previous"
    shutil.copytree(stored, previous)
    done = pipeline(
        "image",
        "tiny",
        "--tp",
        "2",
        "--judge",
        "off",
        "--previous",
        str(previous),
        "--image",
        "tuned-test/tiny:again",
        "--json",
    )
    assert done.status == 0, done.stderr
    try:
        key = done.json()["key"]
        manifest = json.loads(
            read_file(client, "tuned-test/tiny:again", f"/opt/flashinfer_autotune_cache/{key}/manifest.json")
        )
        assert manifest["previous"]
    finally:
        client.images.remove("tuned-test/tiny:again", force=True)


@pytest.mark.parametrize("step", ["build the tuner image", "tuning", "replay on"])
def test_ctrl_c_leaves_no_tag_and_no_container(
    step: str, engine: Any, client: Any, home: Path, built: dict[str, Any]
) -> None:
    name = "tuned-test/tiny:interrupted"
    ours = {"label": "tuned-image-pipeline"}
    before = {c.id for c in client.containers.list(all=True, filters=ours)}
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
            process.send_signal(signal.SIGINT)
            break
    said += process.stderr.readlines()
    status = process.wait(timeout=600)
    process.stderr.close()
    assert status == 130, "".join(said)
    assert "Traceback" not in "".join(said)
    assert not [tag for image in client.images.list() for tag in image.tags if tag == name]
    assert {c.id for c in client.containers.list(all=True, filters=ours)} - before == set()
    left = [
        p for p in (home / "tuned-image-pipeline" / "contexts").iterdir() if p.name.startswith((".", "tuned-", "bake-"))
    ]
    assert left == []


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


def test_a_failure_inside_the_stage_is_told_and_never_cached(
    engine: Any, home: Path, monkeypatch: pytest.MonkeyPatch, client: Any, plan_of: Any
) -> None:
    """An op that no adapter knows fails on every rank; the build step itself ends with 0, and the next attempt runs."""
    from pipeline.contract.errors import PipelineError
    from pipeline.contract.plan import OpPlan
    from pipeline.image.flow import build_image
    from pipeline.image.request import Request

    monkeypatch.setenv("DOCKER_HOST", engine.host)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    op = OpPlan("qkv", "no_such_op", {"n": 8, "k": 8}, {"a": "float32", "b": "float32", "out": "float32"}, (1, 2))
    plan = plan_of("broken", op)
    request = Request(root=ROOT, plan=lambda _target, _version: plan, image="tuned-test/tiny:broken")
    for _ in range(2):
        with pytest.raises(PipelineError, match="no_such_op") as caught:
            build_image(request)
        assert int(caught.value.exit_code) in (2, 6)
        assert Path(caught.value.log).is_file()
    assert not [tag for image in client.images.list() for tag in image.tags if tag == "tuned-test/tiny:broken"]


def start(client: Any, command: list[str], **options: Any) -> tuple[int, str, str]:
    container = client.containers.create(NAME, command, network_mode="none", **options)
    try:
        container.start()
        status = container.wait(timeout=600)["StatusCode"]
        return (
            status,
            container.logs(stdout=True, stderr=False).decode(),
            container.logs(stdout=False, stderr=True).decode(),
        )
    finally:
        container.remove(force=True)


def test_the_entry_point_says_one_line_and_becomes_the_command(built: dict[str, Any], client: Any) -> None:
    status, out, err = start(client, ["sh", "-c", "echo pid $$; echo $PIPELINE_TUNED_CACHE; exit 41"])
    assert status == 41
    assert out.splitlines()[0] == "pid 1"
    assert out.splitlines()[1] == f"/opt/flashinfer_autotune_cache/{built['key']}/autotune_configs.json"
    assert err.startswith(f"tuned cache: {built['entries']} entries for ")
    assert len(err.splitlines()) == 1


def test_a_start_that_requires_a_tuned_cache_ends_before_the_command(built: dict[str, Any], client: Any) -> None:
    environment = {"PIPELINE_REQUIRE_TUNED": "1", "PIPELINE_AUTOTUNE_CACHE_DIR": "/nowhere"}
    status, out, err = start(client, ["echo", "started"], environment=environment)
    assert status == 7
    assert out == ""
    assert "PIPELINE_REQUIRE_TUNED" in err
    assert "Traceback" not in err


def test_the_entry_point_serves_another_user_on_a_read_only_root(built: dict[str, Any], client: Any) -> None:
    status, out, err = start(
        client,
        ["sh", "-c", "echo $FLASHINFER_WORKSPACE_BASE"],
        user=ANYBODY,
        read_only=True,
        tmpfs={"/tmp": "mode=1777"},
    )
    assert status == 0
    assert out.strip()
    assert f"{built['entries']} entries" in err


def test_what_is_installed_is_listed_for_the_sbom(built: dict[str, Any], client: Any, home: Path) -> None:
    from pipeline.image.contain import Sandbox, run_to_end
    from pipeline.release.sbom import installed

    def run(command: Any) -> str:
        return run_to_end(client, NAME, list(command), Sandbox(user="65532:65532", read_only=True), max_wait=300).stdout

    found = installed(run, home / "tuned-image-pipeline" / "wheels")
    packages = {(one.kind, one.name): one for one in found.packages}
    torch = packages["python", "torch"]
    assert torch.version.startswith("2.") and len(torch.sha256) == 64, "the wheel that the pipeline resolved"
    assert ("python", "flashinfer-python") in packages
    assert packages["debian", "libc6"].architecture and found.release["ID"] == "debian"
