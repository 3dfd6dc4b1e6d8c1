"""The parts of the image room that need no engine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.errors import BuildError, PipelineError
from pipeline.contract.places import CACHE_ROOT
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.contract.verdict import Verdict
from pipeline.image import contexts, store
from pipeline.image.buildkit import Builder, SnapshotLost, Stage, StageFailed
from pipeline.image.contain import Sandbox
from pipeline.image.device import DeviceUnknown, processor
from pipeline.image.facts import BaseFacts
from pipeline.image.naming import default_name
from pipeline.image.needed import needed
from pipeline.image.pinned import pin_contexts
from pipeline.image.report import show_changed
from pipeline.image.retune import Changed
from pipeline.image.saved import ExportUnreadable, read_saved
from pipeline.image.settings import ImageNameInvalid, PreviousMissing, check_image_name, check_previous
from pipeline.image.tuning import TuningFailed, _raise_failure
from pipeline.image.wrap import COMMAND, Runs

OP = OpPlan("qkv", "cpu_mm", {"n": 8, "k": 4}, {"a": "float32", "b": "float32", "out": "float32"}, (1, 2))
PLAN = Plan("tiny", "cpu", "cpu-x86_64", "0.6.16.post3", Layout(tp=2), (OP,))


def test_platform_tags_run_from_the_base_s_glibc_downwards() -> None:
    tags = BaseFacts("id", "3.11", "x86_64", (2, 36)).platforms()
    assert tags[0] == "manylinux_2_36_x86_64"
    assert "manylinux_2_28_x86_64" in tags
    assert "manylinux_2_17_x86_64" in tags
    assert "manylinux_2_37_x86_64" not in tags


def tree_digest(root: Path) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(root.rglob("*")):
            info = tar.gettarinfo(str(path), str(path.relative_to(root)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            tar.addfile(info, io.BytesIO(path.read_bytes()) if path.is_file() else None)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


class Copied:
    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def copy_below(self, root: Path) -> None:
        shutil.copytree(self.tree, root)


def test_a_staged_cache_is_the_same_whenever_it_is_staged(tmp_path: Path) -> None:
    digests = []
    for turn in range(2):
        tree = tmp_path / f"tree{turn}"
        key = tree / "0.6.16" / "cpu-x86_64" / ("a" * 64)
        key.mkdir(parents=True, mode=0o700 if turn else 0o755)
        (key / "autotune_configs.json").write_text("{}")
        (key / "autotune_configs.json").chmod(0o600 if turn else 0o644)
        os.utime(key / "autotune_configs.json", (turn * 1000, turn * 1000))
        digests.append(tree_digest(contexts.stage_key(Copied(tree), tmp_path / f"context{turn}")))
    assert digests[0] == digests[1]
    assert (tmp_path / "context0" / CACHE_ROOT.lstrip("/") / "0.6.16").is_dir()


def test_files_of_one_size_and_different_content_get_different_times(tmp_path: Path) -> None:
    """BuildKit would take them for the same file and keep the old bytes."""
    times = []
    for content in ("abc", "abd", "abc"):
        place = tmp_path / str(len(times))
        place.mkdir()
        (place / "f").write_text(content)
        times.append((contexts.settle(place) / "f").stat().st_mtime_ns)
    assert times[0] == times[2] != times[1]
    assert times[0] % 1_000_000_000 == 0


def test_a_context_has_a_name_for_each_content_and_the_dockerfile_says_so(tmp_path: Path) -> None:
    text = b"COPY --link --from=tuned / /\nRUN --mount=type=bind,from=wheels,target=/w x\nCOPY --from=tuning /out/ /\n"
    places = {"tuned": tmp_path / "a", "wheels": tmp_path / "b"}
    for place in places.values():
        place.mkdir()
        (place / "f").write_text("1")
        contexts.settle(place)
    pinned, named = pin_contexts(text, places)
    assert pin_contexts(text, places) == (pinned, named)
    assert re.fullmatch(
        rb"COPY --link --from=tuned-[0-9a-f]{12} / /\nRUN --mount=type=bind,from=wheels-[0-9a-f]{12},target=/w x\n"
        rb"COPY --from=tuning /out/ /\n",
        pinned,
    )
    assert set(named.values()) == set(places.values())
    (places["tuned"] / "f").write_text("2")
    contexts.settle(places["tuned"])
    assert set(pin_contexts(text, places)[1]) != set(named)


def test_a_target_is_built_from_the_stages_that_it_needs_and_no_comments() -> None:
    text = b"""# syntax=docker/dockerfile:1
# about all
ARG BASE_IMAGE=x
FROM ${BASE_IMAGE} AS base
# about the step
RUN --mount=type=bind,from=tools,target=/t <<EOF
# a line of the script
FROM nothing
EOF
FROM scratch AS tools
COPY a \\
    # inside
    b
FROM base AS unused
COPY --from=given-123 / /
FROM base AS final
COPY --link --from=given-456 / /
USER root
"""
    assert needed(text, "final") == (
        b"# syntax=docker/dockerfile:1\nARG BASE_IMAGE=x\nFROM ${BASE_IMAGE} AS base\n"
        b"RUN --mount=type=bind,from=tools,target=/t <<EOF\n# a line of the script\nFROM nothing\nEOF\n"
        b"FROM scratch AS tools\nCOPY a \\\n    # inside\n    b\n"
        b"FROM base AS final\nCOPY --link --from=given-456 / /\nUSER root\n"
    )
    assert needed(text, "nowhere") == text
    for name in ("Dockerfile", "Dockerfile.cuda", "Dockerfile.overlay"):
        whole = (Path(__file__).parents[2] / "docker" / name).read_bytes()
        assert b"AS tuning" in needed(whole, "tuned")
        assert b"AS tuning" not in needed(whole.replace(b"from=tuned ", b"from=tuned-1 "), "final")


def test_the_staged_code_is_what_the_image_needs_and_no_more(tmp_path: Path) -> None:
    package = Path(contexts.__file__).resolve().parents[1]
    code = contexts.stage_code(package, tmp_path / "code")
    code = code / "opt" / "pipeline"
    names = {p.relative_to(code).parts[1] for p in code.rglob("*.py")}
    assert names == {*contexts.SHIPPED_MODULES, *contexts.SHIPPED_ROOMS}
    assert (code / "bin" / "pipeline-run").read_bytes().startswith(b"#!")
    assert os.access(code / "bin" / "pipeline-run", os.X_OK)
    assert not list(code.rglob("__pycache__"))


def test_the_store_gives_back_what_was_kept_and_nothing_damaged(tmp_path: Path) -> None:
    inputs = store.Inputs("plan", "tuner", {"model": "x"}, {"timeout": 300})
    assert store.take(tmp_path, inputs) is None
    root = tmp_path / "root"
    (root / "v").mkdir(parents=True)
    (root / "v" / "f").write_text("1")
    kept = store.keep(tmp_path, inputs, root, 1.5)
    assert (kept.root / "v" / "f").read_text() == "1"
    found = store.take(tmp_path, inputs)
    assert found is not None
    assert found.reused
    assert found.seconds == 1.5
    assert store.take(tmp_path, replace(inputs, device={"model": "y"})) is None
    assert store.take(tmp_path, replace(inputs, previous="z")) is None
    (root / "v").mkdir(parents=True)
    (root / "v" / "f").write_text("2")
    assert (store.keep(tmp_path, inputs, root, 2.0).root / "v" / "f").read_text() == "2"
    (tmp_path / "tuned" / inputs.digest / "outcome.json").write_text("{")
    assert store.take(tmp_path, inputs) is None


def test_a_build_s_command_line_is_the_same_every_time(tmp_path: Path) -> None:
    place = tmp_path / "context"
    place.mkdir()
    builder = Builder({}, b"FROM a\n", tmp_path, tmp_path, tmp_path / "log")
    one = Stage("final", {"b": place, "a": place}, {"Y": "2", "X": "1"}, {"m": "1", "l": "2"})
    two = Stage("final", {"a": place, "b": place}, {"X": "1", "Y": "2"}, {"l": "2", "m": "1"})
    assert builder.command(one) == builder.command(two)
    assert "--network=none" in builder.command(one)
    assert "--provenance=false" in builder.command(one)


def test_a_failed_stage_says_the_builder_s_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "docker").write_text(
        "#!/bin/sh\necho '#7 0.312 assert failed: no torch'\necho 'ERROR: process did not complete'\nexit 1\n"
    )
    (fake / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    with pytest.raises(StageFailed, match="stage runtime did not build: assert failed: no torch") as caught:
        Builder({}, b"FROM a\n", tmp_path, tmp_path, tmp_path / "log").build(Stage("runtime", {}))
    assert isinstance(caught.value, BuildError)
    assert any("no torch" in line for line in caught.value.details)


def test_a_snapshot_that_buildkit_lost_is_gone_round_for_files_and_told_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BuildKit's words are those of Engine 26.1.5 with the containerd store."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "docker").write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" != --file ] || file=$2; shift; done\n'
        'grep -q "COPY --link" "$file" || exit 0\n'
        "echo '#16 ERROR: failed to apply diffs: 1 error occurred:'\n"
        "echo '\t* failed to stat lower snapshot o4vf: snapshot o4vf does not exist: not found'\nexit 1\n"
    )
    (fake / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    builder = Builder({}, b"FROM a\nCOPY --link --from=b / /\n", tmp_path, tmp_path, tmp_path / "log")
    builder.build(Stage("tuned", {}, output=tmp_path / "out"))
    assert "plain copies" in capsys.readouterr().err
    with pytest.raises(SnapshotLost, match="lost a snapshot of the base") as caught:
        builder.build(Stage("final", {}))
    assert int(caught.value.exit_code) == 5 and "docker buildx prune" in caught.value.hint


def test_a_failure_in_the_stage_comes_back_with_each_rank_s_last_step(tmp_path: Path) -> None:
    path = tmp_path / "failure.json"
    _raise_failure(path, tmp_path / "log")  # none: nothing is raised
    told = {"exit_code": 6, "message": "rank 1 stopped", "hint": "h", "details": [],
            "ranks": [{"rank": 1, "step": "tune qkv", "stack": "File a\nFile b"}]}  # fmt: skip
    path.write_text(json.dumps(told))
    with pytest.raises(TuningFailed, match="rank 1 stopped") as caught:
        _raise_failure(path, tmp_path / "log")
    assert caught.value.details[0] == "rank 1: last step tune qkv"
    assert int(caught.value.exit_code) == 6
    for code in (2, 7):
        path.write_text(json.dumps({**told, "exit_code": code}))
        with pytest.raises(PipelineError) as other:
            _raise_failure(path, tmp_path / "log")
        assert int(other.value.exit_code) == code


@pytest.mark.parametrize(
    ("model", "device", "name"),
    [
        ("tiny", "cpu-x86_64", "tuned/tiny:tp2-cpu-x86-64-fi0.6.16.post3-abcdefab"),
        ("Llama 3.1/8B", "H200", "tuned/llama-3.1-8b:tp2-h200-fi0.6.16.post3-abcdefab"),
        ("Ünï Ø..a.-b", "x" * 90, "tuned/n-a-b:tp2-" + "x" * 60 + "-fi0.6.16.post3-abcdefab"),
    ],
)
def test_default_names_are_valid_image_names(model: str, device: str, name: str) -> None:
    made = default_name(model, 2, device, "0.6.16.post3", "abcdefab" * 8)
    assert made == name
    check_image_name(made)


@pytest.mark.parametrize("name", ["Upper/case", "a b", "-x", "a:b:c d", "a//", "x:", "é"])
def test_names_that_no_image_may_have_are_refused(name: str) -> None:
    with pytest.raises(ImageNameInvalid):
        check_image_name(name)


@pytest.mark.parametrize("name", ["", "a", "tuned/tiny:1", "registry.example:5000/a/b:c", "localhost:5000/x__y"])
def test_names_that_an_image_may_have_pass(name: str) -> None:
    check_image_name(name)


def test_a_previous_cache_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert check_previous(None) is None
    with pytest.raises(PreviousMissing):
        check_previous(tmp_path / "none")


def test_the_processor_is_read_from_cpuinfo() -> None:
    text = "".join(f"processor\t: {n}\nmodel name\t: Some CPU\nflags\t\t: b a\n" for n in range(2))
    told = processor(text)
    assert told["model"] == "Some CPU"
    assert told["count"] == 2
    assert told["flags"] == hashlib.sha256(b"a b").hexdigest()
    with pytest.raises(DeviceUnknown):
        processor("nothing")


def test_no_sandbox_has_a_network() -> None:
    for sandbox in (Sandbox(), Sandbox(user="1:1", read_only=True)):
        assert sandbox.options()["network_mode"] == "none"
    assert Sandbox(read_only=True).options()["tmpfs"] == {"/tmp": "rw,mode=1777"}


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        (Runs("", (), ("/bin/bash",)), 'USER root\nENTRYPOINT ["{c}"]\nCMD ["/bin/bash"]\n'),
        (Runs("1000:5", ("serve", "$X"), ()), 'USER 1000:5\nENTRYPOINT ["{c}", "serve", "$X"]\n'),
        (Runs("", (), ()), 'USER root\nENTRYPOINT ["{c}"]\nCMD ["/bin/sh"]\n'),
        (Runs("", (COMMAND, "serve"), ("a",)), 'USER root\nENTRYPOINT ["{c}", "serve"]\nCMD ["a"]\n'),
    ],
)
def test_what_the_base_runs_is_wrapped_once_and_kept(runs: Runs, text: str) -> None:
    assert runs.wrapped() == text.replace("{c}", COMMAND)


class FakeImage:
    def __init__(self, members: dict[str, bytes]) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        self.data = buffer.getvalue()

    def save(self, chunk_size: int) -> list[bytes]:
        return [self.data[i : i + 777] for i in range(0, len(self.data), 777)]


class FakeClient:
    def __init__(self, members: dict[str, bytes]) -> None:
        self.images = self
        self.members = members

    def get(self, _name: str) -> FakeImage:
        return FakeImage(self.members)


def layer(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    return buffer.getvalue()


def test_an_export_gives_the_config_digest_and_the_last_layer_s_names() -> None:
    last = layer("opt/a", "opt/b")
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:1", "sha256:" + hashlib.sha256(last).hexdigest()]}}).encode()
    manifest = json.dumps([{"Config": "blobs/c", "Layers": ["blobs/1", "blobs/2"]}]).encode()
    client: Any = FakeClient({"blobs/c": config, "blobs/2": last, "manifest.json": manifest})
    saved = read_saved(client, "x")
    assert saved.config_digest == "sha256:" + hashlib.sha256(config).hexdigest()
    assert saved.last == (("opt/a", "opt/b"),)
    forged: Any = FakeClient({"blobs/c": config, "blobs/2": layer("opt/c"), "manifest.json": manifest})
    with pytest.raises(ExportUnreadable):
        read_saved(forged, "x")
    empty: Any = FakeClient({"a": b""})
    with pytest.raises(ExportUnreadable):
        read_saved(empty, "x")


def test_the_plan_s_digest_is_its_meaning_alone() -> None:
    other = replace(PLAN, model="other", seed=7, ops=(replace(OP, name="renamed", layers=9),))
    assert other.digest == PLAN.digest
    assert replace(PLAN, round_up=True).digest != PLAN.digest
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_a_retuned_image_shows_what_its_replay_counted(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {"hits": 359, "replayed calls": 360}
    verdict = Verdict("c", "l", "m", "k", "d", "replay", "pass", checks)
    show_changed(Changed("i:t", "id", ("k",), verdict, ("a", "b"), 14.06), as_json=False)
    shown = capsys.readouterr().err
    assert "replay: 359 of 360 calls hit\n" in shown and "14.1 s" in shown
    more = replace(verdict, checks={**checks, "calls as others ask": 36, "hits as others ask": 35})
    show_changed(Changed("i:t", "id", ("k",), more, ()), as_json=False)
    assert "calls hit, and 35 of 36 for callers whose scales have the shape (1,)\n" in capsys.readouterr().err
    show_changed(Changed("i:t", "id", ("k",), replace(verdict, level="static"), ()), as_json=False)
    shown = capsys.readouterr().err
    assert "NOT REPLAYED" in shown and "tune time" not in shown
