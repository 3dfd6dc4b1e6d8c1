"""The parts of the image room that need no engine: names, contexts, the store, imported caches, errors of a build."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_samples as samples
import pytest
from docker.errors import ImageNotFound
from requests.exceptions import ConnectionError as Disconnected
from requests.exceptions import ReadTimeout

from pipeline.cache.integrity import collect
from pipeline.contract.digest import image_identity
from pipeline.contract.errors import BuildError, CacheRefused, DockerError, PipelineError, UsageError
from pipeline.contract.places import CACHE_FILE, CACHE_ROOT
from pipeline.image import clean, session, warm_up, wheels
from pipeline.image.bake import Layer, Runs, beside_those_of_base, finished
from pipeline.image.buildx import Build, build, command, pin_contexts
from pipeline.image.containers import ContainerSpec, ContainerTimeout, wait
from pipeline.image.contexts import Destination, Staging, settle, stage_layer
from pipeline.image.names import (
    KEY,
    PIPELINE_RUN,
    PREFIX,
    TUNERS,
    check_free,
    check_image_name,
    check_reference,
    usual_name,
)
from pipeline.image.probe import BaseFacts
from pipeline.image.producer import CacheDir, WarmUp
from pipeline.image.session import UNNAMED, Session, is_gone, log_file
from pipeline.image.tuner import _raise_failure
from pipeline.run import ProcessFailed

H200 = "NVIDIA H200"
PLACE = f"{CACHE_ROOT}/0.6.16/cpu-x86_64/{'a' * 64}"


def a_session(home: Path, *, answers: bool = True) -> Session:
    (home / "contexts").mkdir(parents=True, exist_ok=True)

    def ping() -> bool:
        if not answers:
            raise ConnectionError
        return True

    from pipeline.daemon import engine_from

    info = {"ServerVersion": "28.5.2", "OSType": "linux", "Architecture": "x86_64"}
    client: Any = SimpleNamespace(ping=ping)
    return Session(engine_from("unix:///x", "DOCKER_HOST", info, "1.51"), client, home, home / "log")


def cache_tree(root: Path, *, mode: int = 0o644, when: int = 0, text: str = "{}") -> Path:
    place = root / PLACE.lstrip("/")
    place.mkdir(parents=True)
    (place / CACHE_FILE).write_text(text)
    (place / CACHE_FILE).chmod(mode)
    os.utime(place / CACHE_FILE, (when, when))
    return root


def listed(root: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p.relative_to(root)), p.stat().st_mode, p.stat().st_mtime_ns) for p in root.rglob("*"))


def test_the_same_cache_gives_the_same_context_whenever_and_by_whom_it_was_made(tmp_path: Path) -> None:
    found = []
    for turn, (mode, when) in enumerate([(0o600, 1000), (0o644, 2000)]):
        tree = cache_tree(tmp_path / f"tree{turn}", mode=mode, when=when)
        place = tmp_path / f"context{turn}"
        found.append(listed(stage_layer(tree, PLACE, Destination(PLACE), place, keep_times=False, writable=False)))
    assert found[0] == found[1]
    assert all(time % 1_000_000_000 == 0 for _, _, time in found[0])


def test_a_layer_goes_where_the_base_has_its_folder_and_keeps_the_modes_of_the_folders_above(tmp_path: Path) -> None:
    real = PLACE.replace("/opt/", "/data/opt/")
    where = Destination(real, (("/data", 0o1770, 0, 0), ("/data/opt", 0o2775, 0, 50)))
    place = stage_layer(
        cache_tree(tmp_path / "tree"), PLACE, where, tmp_path / "context", keep_times=False, writable=True
    )
    assert (place / "data").stat().st_mode & 0o7777 == 0o1770
    assert (place / "data/opt").stat().st_mode & 0o7777 == 0o2775
    assert (place / real.lstrip("/")).stat().st_mode & 0o7777 == 0o777
    assert (place / real.lstrip("/")).parent.stat().st_mode & 0o7777 == 0o777, "a server makes others beside it"
    assert (place / real.lstrip("/") / CACHE_FILE).stat().st_mode & 0o777 == 0o666
    assert not where.linked, "a linked layer would make another owner's folder root's"
    assert Layer("c", real, linked=False).line() == f"COPY --from=c {real} {real}"
    assert Destination(PLACE, (("/opt", 0o1770, 0, 0),)).linked


def test_times_that_a_reader_compares_are_kept(tmp_path: Path) -> None:
    tree = cache_tree(tmp_path / "tree", when=1234)
    place = stage_layer(tree, PLACE, Destination(PLACE), tmp_path / "context", keep_times=True, writable=False)
    assert (place / PLACE.lstrip("/") / CACHE_FILE).stat().st_mtime == 1234


def test_files_of_one_size_and_different_content_get_different_times(tmp_path: Path) -> None:
    """BuildKit would take them for the same file and keep the old bytes."""
    times = []
    for content in ("abc", "abd", "abc"):
        place = tmp_path / str(len(times))
        place.mkdir()
        (place / "f").write_text(content)
        times.append((settle(place) / "f").stat().st_mtime_ns)
    assert times[0] == times[2] != times[1]


def test_a_context_has_a_name_for_each_content_and_the_dockerfile_says_so(tmp_path: Path) -> None:
    text = b"COPY --link --from=plan / /\nRUN --mount=type=bind,from=wheels,target=/w x\nCOPY --from=tuning /out/ /\n"
    places = {"plan": tmp_path / "a", "wheels": tmp_path / "b", "unused": tmp_path / "c"}
    for place in places.values():
        place.mkdir()
        (place / "f").write_text("1")
        settle(place)
    pinned, named = pin_contexts(text, places)
    assert re.fullmatch(
        rb"COPY --link --from=plan-[0-9a-f]{12} / /\nRUN --mount=type=bind,from=wheels-[0-9a-f]{12},target=/w x\n"
        rb"COPY --from=tuning /out/ /\n",
        pinned,
    )
    assert set(named.values()) == {places["plan"], places["wheels"]}
    (places["plan"] / "f").write_text("2")
    settle(places["plan"])
    assert pin_contexts(text, places)[0] != pinned


def test_the_image_gets_what_a_start_needs_and_nobody_can_import_it(tmp_path: Path) -> None:
    staged = Staging(tmp_path)
    code = staged.code(Destination("/opt/pipeline")) / "opt" / "pipeline"
    assert {p.name for p in (code / "lib" / "pipeline").iterdir()} == {
        "__init__.py", "contract", "flashinfer", "cache", "start",
    }  # fmt: skip
    assert [p.name for p in code.iterdir()] == ["lib", "bin"] or {p.name for p in code.iterdir()} == {"lib", "bin"}
    assert os.access(code / "bin" / "pipeline-run", os.X_OK)
    tools = staged.tuner({"plan.json": b"{}"})
    assert {p.name for p in tools.iterdir()} == {"launcher.py", "pipeline", "plan.json"}
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        (Runs("", (), ("/bin/bash",)), 'USER root\nENTRYPOINT ["{c}"]\nCMD ["/bin/bash"]'),
        (Runs("1000:5", ("serve", "$X"), ()), 'USER 1000:5\nENTRYPOINT ["{c}", "serve", "$X"]'),
        (Runs("", (), ()), 'USER root\nENTRYPOINT ["{c}"]\nCMD ["/bin/sh"]'),
        (Runs("", (PIPELINE_RUN, "serve"), ("a",)), 'USER root\nENTRYPOINT ["{c}", "serve"]\nCMD ["a"]'),
    ],
)
def test_what_the_base_runs_is_wrapped_once_and_kept(runs: Runs, text: str) -> None:
    assert runs.wrapped() == text.replace("{c}", PIPELINE_RUN)


def test_the_caches_are_found_without_the_entry_point_through_static_variables() -> None:
    made = finished(b"FROM a AS final", [Layer("cache-0", "/x")], {"A": 'b "c" $d'}, Runs("", (), ()))
    assert made.startswith(b'FROM a AS final\nCOPY --link --from=cache-0 / /\nENV A="b \\"c\\" \\$d"\nUSER root\n')


def test_no_container_has_a_network_or_a_capability() -> None:
    for spec in (ContainerSpec(), ContainerSpec(user="1:1", read_only=True, files={"/x": b""})):
        chosen = spec.options()
        assert chosen["network_mode"] == "none" and chosen["cap_drop"] == ["ALL"]
        assert chosen["security_opt"] == ["no-new-privileges"] and "pid_mode" not in chosen


@pytest.mark.parametrize(
    ("model", "device", "name"),
    [
        ("tiny", "cpu-x86_64", "tuned/tiny:tp2-cpu-x86-64-fi0.6.16.post3-abcdefab"),
        ("Llama 3.1/8B", "H200", "tuned/llama-3.1-8b:tp2-h200-fi0.6.16.post3-abcdefab"),
        ("Ünï Ø..a.-b", "x" * 90, "tuned/n-a-b:tp2-" + "x" * 60 + "-fi0.6.16.post3-abcdefab"),
    ],
)
def test_usual_names_are_valid_image_names(model: str, device: str, name: str) -> None:
    made = usual_name(model, 2, device, "fi0.6.16.post3", "abcdefab" * 8)
    assert made == name
    check_image_name(made)


@pytest.mark.parametrize("name", ["Upper/case", "a b", "-x", "a:b:c d", "a//", "x:", "é"])
def test_names_that_no_image_may_have_are_refused(name: str) -> None:
    for check in (check_image_name, check_reference):
        with pytest.raises(UsageError):
            check(name)


@pytest.mark.parametrize("name", ["a", "tuned/tiny:1", "registry.example:5000/a/b:c", "localhost:5000/x__y"])
def test_names_that_an_image_may_have_pass(name: str) -> None:
    check_image_name(name)
    check_reference(f"{name}@sha256:{'0' * 64}")


def test_an_identity_is_of_layers_and_of_what_a_container_gets() -> None:
    config = {"Env": ["A=b"], "Cmd": ["x"], "User": "", "Labels": None, "ArchitectureOfTheStore": "anything"}
    one = image_identity(["sha256:1"], config)
    assert one == image_identity(("sha256:1",), {"Env": ["A=b"], "Cmd": ["x"], "Labels": {}})
    for changed in ({"Env": ["A=c"]}, {"Cmd": None}, {"User": "1"}, {"Labels": {"a": "b"}}, {"Entrypoint": ["e"]}):
        assert image_identity(["sha256:1"], {**config, **changed}) != one
    assert image_identity(["sha256:2"], config) != one


def kept(home: Path, text: str = "{}", digest: str = "d") -> WarmUp:
    with warm_up.making(home) as work:
        root = cache_tree(work / "made", text=text)
        return warm_up.keep(
            home, digest, WarmUp(root, (CacheDir("k", PLACE, 2),), {"A": "b"}, (), 1.5), {"plan": 1}, work
        )


def test_the_store_gives_back_what_was_kept_and_nothing_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warm_up.find_entry(tmp_path, "d") is None
    made = kept(tmp_path)
    assert warm_up.find_entry(tmp_path, "d") == made and made.seconds == 1.5 and made.environment == {"A": "b"}
    assert warm_up.find_entry(tmp_path, "e") is None
    again = kept(tmp_path, "[]")
    assert (again.root / PLACE.lstrip("/") / CACHE_FILE).read_text() == "[]"
    assert [one.name for one in warm_up.folder(tmp_path).iterdir()] == ["d"], "nothing half-made stays"
    shutil.rmtree(again.root / "opt")
    assert warm_up.find_entry(tmp_path, "d") is None
    assert "damaged" in capsys.readouterr().err


def test_two_runs_that_keep_the_same_at_one_time_both_end_well(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kept(tmp_path), range(12)))
    assert warm_up.find_entry(tmp_path, "d") is not None
    assert [one.name for one in warm_up.folder(tmp_path).iterdir()] == ["d"]


@pytest.mark.parametrize("spoil", [lambda p: p.write_text(""), lambda p: p.symlink_to("/nowhere/at/all")])
def test_a_store_that_takes_nothing_is_said_before_anything_is_warmed_up(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(warm_up.folder(tmp_path))
    with pytest.raises(UsageError, match="cannot be written to"), warm_up.making(tmp_path):
        pytest.fail("warmed up in vain")


def test_a_full_store_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "move", full)
    with pytest.raises(UsageError, match="No space left on device"):
        kept(tmp_path)
    assert not list(warm_up.folder(tmp_path).iterdir())


def test_unsound_caches_are_refused_with_every_reason(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "bad", H200)
    (path / CACHE_FILE).write_text("{}")
    with pytest.raises(CacheRefused, match="validation error") as caught:
        collect([tmp_path / "bad"])
    assert caught.value.details
    with pytest.raises(UsageError, match="not a directory"):
        collect([tmp_path / "none"])


def test_a_failure_in_the_stage_comes_back_with_each_rank_s_last_step(tmp_path: Path) -> None:
    path = tmp_path / "failure.json"
    _raise_failure(path, "log")  # none: nothing is raised
    value = {"message": "rank 1 stopped", "hint": "h", "details": [],
             "ranks": [{"rank": 1, "step": "tune qkv", "stack": "File a\nFile b"}]}  # fmt: skip
    for code in (2, 6, 7):
        path.write_text(json.dumps({**value, "exit_code": code}))
        with pytest.raises(PipelineError, match="rank 1 stopped") as caught:
            _raise_failure(path, "log")
        assert int(caught.value.exit_code) == code
        assert caught.value.details[0] == "rank 1: last step tune qkv"


@pytest.mark.parametrize(
    ("error", "log", "raised", "message"),
    [
        (ReadTimeout(), b"half", ContainerTimeout, "tuning did not end within 0 s"),
        (Disconnected(), b"half", DockerError, "connection to the Docker Engine was lost while tuning ran"),
        (ReadTimeout(), None, DockerError, "connection to the Docker Engine was lost while tuning ran"),
    ],
)
def test_a_connection_that_drops_is_not_taken_for_a_container_that_takes_too_long(
    error: Exception, log: bytes | None, raised: type[PipelineError], message: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    def logs(**_: object) -> bytes:
        if log is None:
            raise Disconnected
        return log

    container: Any = SimpleNamespace(wait=fail, logs=logs)
    with pytest.raises(raised, match=message) as caught:
        wait(container, "tuning", 60.0)
    assert caught.value.details == (("half",) if log else ())


LABELS = {
    KEY: "k1",
    f"{PREFIX}.plan": "p1",
    f"{PREFIX}.manifest": "m1",
    f"{PREFIX}.flashinfer": "0.6",
    f"{PREFIX}.arch": "90a",
}


@pytest.mark.parametrize(("key", "keys", "plans"), [("k2", "k1,k2", "p1,p2"), ("k1", "k1", "p2")])
def test_keys_that_a_base_has_stay_in_the_labels_and_no_variable_names_one_of_several(
    key: str, keys: str, plans: str
) -> None:
    added = {**LABELS, KEY: key, f"{PREFIX}.plan": "p2", f"{PREFIX}.manifest": "m2", f"{PREFIX}.arch": "100a"}
    made = WarmUp(Path(), (), {"PIPELINE_TUNED_CACHE": "/file"}, labels=added)
    both = beside_those_of_base(made, LABELS)
    assert (both.labels[KEY], both.labels[f"{PREFIX}.plan"], both.labels[f"{PREFIX}.arch"]) == (keys, plans, "90a,100a")
    assert both.environment["PIPELINE_TUNED_CACHE"] == ("" if "," in keys else "/file")
    assert beside_those_of_base(made, {}) == made


def test_a_name_of_another_image_is_not_taken() -> None:
    images = {"theirs:1": {}, "ours:1": {KEY: "k"}}

    def get(name: str) -> Any:
        if name not in images:
            raise ImageNotFound(name)
        return SimpleNamespace(labels=images[name], id=f"id of {name}")

    client: Any = SimpleNamespace(images=SimpleNamespace(get=get))
    assert (check_free(client, "ours", "1"), check_free(client, "free", "1")) == ("id of ours:1", "")
    with pytest.raises(UsageError, match="theirs:1 is the name of another image") as caught:
        check_free(client, "theirs", "1")
    assert "docker rmi theirs:1" in caught.value.hint


def fake_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("said", "answers", "error", "message"),
    [
        ("#7 0.312 assert failed: no torch", True, BuildError, "target runtime did not build: assert failed: no torch"),
        ("ERROR: write /x: no space left on device", True, BuildError, "no space left"),
        ("#7 0.312 importing torch", False, DockerError, "went away while target runtime was built"),
        ("", True, BuildError, "no reason was printed"),
    ],
)
def test_a_build_that_fails_says_why(
    said: str, answers: bool, error: type[PipelineError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path, monkeypatch, f"echo '{said}'\nexit 1\n")
    with pytest.raises(error, match=message) as caught:
        build(a_session(tmp_path, answers=answers), Build(b"FROM a\n", "runtime", {}))
    assert caught.value.log and caught.value.hint


def test_a_build_s_command_line_is_the_same_every_time_and_has_no_network(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    text = b"FROM a\nCOPY --from=a / /\nCOPY --from=b / /\n"
    one = Build(text, "final", {"b": tmp_path / "c", "a": tmp_path / "c"}, {"Y": "2", "X": "1"}, {"m": "1", "l": "2"})
    two = Build(text, "final", {"a": tmp_path / "c", "b": tmp_path / "c"}, {"X": "1", "Y": "2"}, {"l": "2", "m": "1"})
    words = command(a_session(tmp_path), one)
    assert words == command(a_session(tmp_path), two)
    assert {"--network=none", "--provenance=false"} <= set(words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no space left"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "has another wheel than"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "lacks a wheel .*torch==2.13.0"),
        ("ERROR: SSLError(certificate verify failed)", "could not fetch"),
    ],
)
def test_each_failure_of_pip_has_its_message(line: str, message: str) -> None:
    error = wheels._failed(Path("image-cpu.txt"), ProcessFailed(["pip"], 1, [line]), "log")
    assert re.search(message, error.message) and error.hint
    assert ("proxy" in error.hint) == ("SSL" in line)


def test_platform_tags_run_from_the_base_s_glibc_downwards() -> None:
    tags = BaseFacts("3.11", "x86_64", (2, 36)).platforms()
    assert tags[0] == "manylinux_2_36_x86_64" and "manylinux2014_x86_64" in tags and tags[-1] == "linux_x86_64"
    assert not any("2_37" in tag for tag in tags)
    assert BaseFacts("3.12", "aarch64", (2, 28)).platforms()[0] == "manylinux_2_28_aarch64"


def test_logs_are_kept_to_the_newest_twenty_whoever_else_removes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    (tmp_path / "logs").mkdir()
    for at in range(60):
        (tmp_path / "logs" / f"20200101-0000{at:02}-build-x.log").touch()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: log_file(tmp_path, f"build{at}"), range(16)))
    assert len(list((tmp_path / "logs").glob("*.log"))) == 20


def test_only_a_run_whose_lock_is_free_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session._running(tmp_path):
        mine = session.RUN
        monkeypatch.setattr(session, "RUN", "0" * 16)
        assert not is_gone(tmp_path, mine, age=1e9), "it lives, however old"
    assert not is_gone(tmp_path, mine, age=10), "it may be another user's"
    assert is_gone(tmp_path, mine, age=1e6)
    (tmp_path / "runs" / "dead").touch()
    assert is_gone(tmp_path, "dead", age=0), "its file is here and nobody locks it"


def test_clean_takes_what_is_old_and_says_so_first(tmp_path: Path) -> None:
    for name in ("contexts/plan-1", "wheels/a", "warm-ups/x"):
        (tmp_path / name).mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "contexts" / "new").mkdir()
    told = clean.clean(None, tmp_path, days=7, dry_run=True)
    assert {Path(item.place).name for item in told} == {"plan-1", "a"} and (tmp_path / "wheels" / "a").is_dir()
    assert [item.place for item in clean.clean(None, tmp_path, days=7, dry_run=False)] == [one.place for one in told]
    assert not (tmp_path / "wheels" / "a").exists()
    assert (tmp_path / "contexts" / "new").exists() and (tmp_path / "warm-ups" / "x").exists()


def test_a_staged_context_counts_as_used(tmp_path: Path) -> None:
    place = Staging(tmp_path).tuner({})
    assert clean.clean(None, tmp_path, days=1, dry_run=True) == []
    assert place.is_dir()


def image_of(name: str, named: str) -> Any:
    """An image as the engine tells of it: this pipeline's are all of one date, their names are not."""
    attrs = {"Created": "2020-01-01T00:00:00Z", "Metadata": {"LastTagTime": named}, "Size": 1}
    return SimpleNamespace(tags=[name], attrs=attrs)


def test_what_another_user_of_the_engine_builds_just_now_stays(tmp_path: Path) -> None:
    now, removed = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()), []
    images = [image_of(f"{UNNAMED}:theirs", now), image_of(f"{UNNAMED}:left", "2020-01-01T00:00:00")]
    listed = SimpleNamespace(list=lambda name: images if name == UNNAMED else [], remove=removed.append)
    client: Any = SimpleNamespace(images=listed, api=SimpleNamespace(containers=lambda **_: []))
    place = a_session(tmp_path)
    clean.clean(Session(place.engine, client, tmp_path, place.log), tmp_path, days=0, dry_run=False)
    assert removed == [f"{UNNAMED}:left"]


def test_clean_keeps_the_newest_tuner_images(tmp_path: Path) -> None:
    removed: list[str] = []
    images = [image_of(f"{TUNERS}:{at}", f"2020-01-0{at}T00:00:00") for at in (1, 3, 2, 4)]

    def none_of_ours(*_words: object, **_more: object) -> list[Any]:
        return []

    listed = SimpleNamespace(list=lambda name: images if name == TUNERS else [], remove=removed.append)
    client: Any = SimpleNamespace(images=listed, api=SimpleNamespace(containers=none_of_ours))
    place = a_session(tmp_path)
    place = Session(place.engine, client, tmp_path, place.log)
    clean.clean(place, tmp_path, days=1e6, dry_run=False)
    assert removed == [f"{TUNERS}:1"]
    clean.clean(place, tmp_path, days=0, dry_run=False)
    assert len(removed) == 1 + len(images)
