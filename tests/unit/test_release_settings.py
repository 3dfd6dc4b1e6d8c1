"""A release before any work: options, tags, annotations, verdicts; and what decides an image."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_samples
import pytest

from pipeline.__main__ import main
from pipeline.contract.errors import CacheRefused, Exit, PublishError, UsageError
from pipeline.contract.verdict import Verdict
from pipeline.image.bake import labels
from pipeline.image.producer import WarmUp
from pipeline.registry import client
from pipeline.registry.client import parallel_map
from pipeline.registry.http import RetryPolicy
from pipeline.release import tags, verdicts
from pipeline.release.run import Row, Summary
from pipeline.release.tags import public_address, revision_annotations

NAMES = tags.Names("Llama-3.1-8B", 2, "0.6.16.post3", "H200", "abcdef0123456789", "fedcba98765432", "vLLM")
MATRIX = '[gpus.h200]\nname = "NVIDIA H200"\narch = "90a"\n[[cells]]\nmodel = "tiny"\ndevice = "cpu"\ntp = 1\n'
CUDA = '[[cells]]\nmodel = "tiny"\ngpu = "h200"\n'


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A matrix; and no Docker Engine that could answer."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    path = tmp_path / "release.toml"
    path.write_text(MATRIX)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "4"], "--tp: with --matrix the matrix says what an image is"),
        (["--cache", "caches/a"], "--cache: with --matrix"),
        (["--device", "cpu", "--buckets", "1,8"], "--device, --buckets: with --matrix"),
        (["--base-image", "x"], "--base-image: with --matrix"),
        (["--previous", "p"], "--previous: with --matrix"),
        (["tiny"], "MODEL: with --matrix"),
        (["--tag", "{modl}"], "did you mean {model}?"),
        (["--floating-tag", "a/b"], "does not produce a valid tag"),
        (["--tag", "inputs-{key}"], "have a meaning of their own"),
        (["--registry", "r.example/a:tag"], "its tag is made by the template"),
        (["--registry", "team/tuned"], "names no registry"),
        (["--sign", "/none/cosign.key"], "no key file"),
    ],
)
def test_settings_that_say_nothing_are_refused(words: list[str], said: str, matrix: Path, capsys: Any) -> None:
    """Each ended in another image than was asked for, or late."""
    given = ["release", "run", "--matrix", str(matrix), *words]
    assert main([*given, *([] if "--registry" in words else ["--registry", "127.0.0.1:1"])]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_what_a_build_would_refuse_is_said_of_every_cell(matrix: Path, capsys: Any) -> None:
    matrix.write_text(f'{MATRIX}buckets = [1, "8-16"]\n{CUDA}max_tokens = 4\nbuckets = "x"\n')
    assert main(["release", "cells", "--matrix", str(matrix), "--registry", "127.0.0.1:1"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "tiny-tp1: --buckets=8-16 is neither a count" in said and "tiny-tp2-h200: --buckets=x is neither" in said


def test_nothing_to_release_is_said(capsys: Any) -> None:
    assert main(["release", "run", "--registry", "127.0.0.1:1"]) == Exit.USAGE
    assert main(["release", "cells", "tiny"]) == Exit.USAGE
    assert "no registry was named" in capsys.readouterr().err
    assert main(["release", "run", "tiny", "tiny", "--registry", "127.0.0.1:1"]) == Exit.USAGE


def inputs(*words: str) -> list[str]:
    """The inputs digests of the cells of a command."""
    import argparse

    from pipeline.commands import release

    parser = argparse.ArgumentParser()
    release.configure_run(parser)
    made = release._prepared(parser.parse_args([*words, "--registry", "127.0.0.1:1"]))
    return [job.inputs for job in made.jobs]


def test_inputs_are_known_without_an_engine_and_cover_what_decides_an_image(matrix: Path, tmp_path: Path) -> None:
    (first,) = inputs("tiny", "--tp", "1")
    assert inputs("tiny", "--tp", "1", "--timeout", "99", "--retune", "--require-idle") == [first], "how, not what"
    others = [
        inputs("tiny", "--tp", "2"), inputs("tiny", "--tp", "1", "--base-image", "x"),
        inputs("tiny", "--tp", "1", "--strategy", "leader"), inputs("tiny", "--tp", "1", "--arch", "90a"),
        inputs("tiny", "--tp", "1", "--no-bake-jit"), inputs("--matrix", str(matrix)),
    ]  # fmt: skip
    matrix.write_text(MATRIX + CUDA)
    cells = inputs("--matrix", str(matrix))
    matrix.write_text((MATRIX + CUDA).replace("H200", "H100"))
    assert inputs("--matrix", str(matrix))[0] == cells[0] and inputs("--matrix", str(matrix))[1] != cells[1]
    assert others.pop() == [first] == cells[:1], "the matrix and the words that say the same"
    assert len({first, *(one for listed in others for one in listed)}) == len(others) + 1
    cache_samples.write(tmp_path / "cache")
    baked = inputs("tiny", "--cache", str(tmp_path / "cache"))
    assert inputs("tiny", "--cache", str(tmp_path / "cache"), "--strategy", "leader") == baked, "nothing is tuned"
    (next((tmp_path / "cache").rglob("manifest.json")).parent / "autotune_configs.json").touch()
    assert inputs("tiny", "--cache", str(tmp_path / "cache")) == baked


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ([], "a CPU"),
        (["--device", "cuda", "--arch", "90a", "--floating-tag", "a", "--floating-tag", "b"], "a GPU of sm_90a"),
        (["--arch", "100a", "--no-bake-jit"], "a GPU of sm_100a"),
    ],
)
def test_a_cell_says_which_device_it_needs(
    words: list[str], device: str, matrix: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(client.Registry, "resolve", lambda *_: None)
    assert main(["release", "cells", "tiny", "--registry", "127.0.0.1:1", "--json", *words]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["name"], cell["device"], cell["released"]) == ("tiny-tp2", device, False)
    assert cell["command"][:4] == ["pipeline", "release", "run", "tiny"] and cell["command"][-2:] == [
        "--cell",
        "tiny-tp2",
    ]
    assert set(words) <= set(cell["command"]) and main([*cell["command"][1:], "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["status"] == "would push", (
        "the command can be typed as it is"
    )


def test_a_cell_whose_cache_is_missing_fails_alone(matrix: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(client, "RetryPolicy", lambda: RetryPolicy(tries=1))
    matrix.write_text(MATRIX + '[[cells]]\nmodel = "tiny"\ncache = "nowhere"\n')
    words = ["release", "cells", "--matrix", str(matrix), "--registry", "127.0.0.1:1"]
    assert main(words) == Exit.PUBLISH
    assert "Connection refused" in capsys.readouterr().err, "the registry is asked, and no engine"
    monkeypatch.setattr(client.Registry, "resolve", lambda *_: None)
    assert main([*words, "--json"]) == Exit.CACHE
    out, err = capsys.readouterr()
    assert [bool(row["error"]) for row in json.loads(out)] == [False, True], "all are listed"
    assert "tiny-tp2: " in err and "nowhere is not a directory" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = "tniy"\ntp = 1\ncache = "nowhere"\n', ["tniy"]),
        ('model = "llama-3.1-8b"\ntp = 7\ngpu = "h200"\ncache = "nowhere"\n', ["llama-3.1-8b-tp7-h200: "]),
        ('model = "tiny"\nname = "b"\n[[cells]]\nmodel = "tiny"\nname = "c"\nbuckets = "x"\n', ["same tag tiny-1", "--buckets=x"]),
    ],
)  # fmt: skip
def test_everything_that_cells_cannot_be_is_said_at_once(text: str, said: list[str], matrix: Path, capsys: Any) -> None:
    """Also of cells whose caches are missing."""
    matrix.write_text(f"{MATRIX}max_tokens = 0.5\n")
    words = ["release", "cells", "--matrix", str(matrix), "--registry", "127.0.0.1:1", "--tag", "{model}-1"]
    assert main(words) == Exit.USAGE and "max_tokens" in capsys.readouterr().err
    matrix.write_text(f"{MATRIX}buckets = 'y'\n[[cells]]\n{text}")
    assert main(words) == Exit.USAGE
    err = capsys.readouterr().err
    assert all(line in err for line in [*said, "tiny-tp1: --buckets=y"]), err


def test_tags_are_what_the_documents_say() -> None:
    assert tags.expand(tags.DEFAULT, NAMES) == "llama-3.1-8b-tp2-h200-fi0.6.16.post3-abcdef01"
    assert tags.fields_of("{server}_{cache}") == ("server", "cache")
    assert tags.expand("{server}_{cache}", NAMES) == "vllm_fedcba98"
    assert len(tags.expand(tags.DEFAULT_WITH_SERVER, replace(NAMES, model="M" * 300, gpu="G" * 300))) <= 128
    with pytest.raises(tags.TemplateInvalid, match="valid tag for Llama"):
        tags.expand("-{server}", replace(NAMES, server=""))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{modell}", "did you mean {model}?"),
        ("{model!r}", "{model} takes no format"),
        ("{tp:>4}", "{tp} takes no format"),
        ("{}", "there is no field"),
        ("{model", "is not a template"),
        ("{model}/{tp}", "valid tag"),
        ("x" * 129, "valid tag"),
        ("sha256-{key}", "meaning of their own"),
    ],
)
def test_templates_that_produce_no_tag_are_refused(template: str, said: str) -> None:
    with pytest.raises(tags.TemplateInvalid) as caught:
        tags.fields_of(template)
    assert said in caught.value.message


def verdict(**change: Any) -> Verdict:
    made = Verdict(
        "sha256:" + "a" * 64, "sha256:" + "b" * 64, "c" * 64, "1/90a/" + "d" * 64, "NVIDIA H200", "replay", "pass",
        {"hits": 9},
    )  # fmt: skip
    return replace(made, **change)


def test_a_replay_here_or_where_the_gpu_is_proves_an_image() -> None:
    own = verdict()
    assert verdicts.sufficient(own, [verdict()]) == (own,), "another that says the same adds nothing"
    static, theirs = verdict(level="static"), verdict(device="another name")
    assert verdicts.sufficient(static, [verdict(identity="sha256:" + "0" * 64), theirs]) == (theirs,)
    with pytest.raises(PublishError) as caught:
        verdicts.sufficient(static, [static], [Path("verdicts/h200")])
    assert caught.value.details == ("verdicts/h200 is not there",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"identity": "sha256:" + "0" * 64}, "is of image sha256:000"),
        ({"cache_diff_id": "sha256:" + "0" * 64}, "is of the cache layer sha256:000"),
        ({"manifest_sha256": "0" * 64}, "of other manifests"),
        ({"result": "fail", "findings": ("it missed",)}, "says fail: it missed"),
    ],
)
def test_a_verdict_on_something_else_proves_nothing(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PublishError, match="no replay verdict for") as caught:
        verdicts.sufficient(verdict(level="static"), [verdict(**change)])
    assert any(said in line for line in caught.value.details), caught.value.details


def test_a_gathered_image_needs_each_key_replayed_by_somebody() -> None:
    first, second = "1/90a/" + "d" * 64, "1/90a/" + "e" * 64
    own = verdict(key=f"{first},{second}", level="static")
    on_h100, on_h200 = replace(own, replayed=(first,)), replace(own, replayed=(second,))
    with pytest.raises(PublishError, match="e" * 64):
        verdicts.sufficient(own, [on_h100])
    assert verdicts.sufficient(own, [on_h100, on_h200]) == (on_h100, on_h200)
    assert verdicts.sufficient(on_h100, [on_h200, on_h100]) == (on_h100, on_h200)


def test_verdicts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.json").write_text(json.dumps(verdict(device=str(number)).to_json()))
    (tmp_path / "notes.txt").write_text("no verdict")
    assert [one.device for one in verdicts.read_files([tmp_path, tmp_path / "1.json"])] == ["0", "1", "1"]
    broken = json.dumps({**verdict().to_json(), "key": 5})
    for name, content in (("a.json", "{"), ("b.json", "{}"), ("c.json", "[" * 100_000), ("d.json", broken)):
        (tmp_path / name).write_text(content)
        with pytest.raises(CacheRefused, match=name):
            verdicts.read_files([tmp_path / name])
    with pytest.raises(UsageError, match="No such file"):
        verdicts.read_files([tmp_path / "none.json"])


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/org/repo.git", "https://github.com/org/repo"),
        ("https://user:token@git.example.com/org/repo", "https://git.example.com/org/repo"),
        ("git@github.com:org/repo.git", "https://github.com/org/repo"),
        ("ssh://git@git.example.com:2222/org/repo", "https://git.example.com/org/repo"),
        ("/srv/git/repo", ""), ("../repo", ""), ("", ""), ("file:///srv/repo", ""), ("https://[bad", ""),
    ],
)  # fmt: skip
def test_the_source_annotation_never_has_a_login(remote: str, address: str) -> None:
    assert public_address(remote) == address


def test_the_commit_and_its_origin_are_annotated(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        own = {"GIT_CONFIG_GLOBAL": "/dev/null", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        words = ("-c", "user.name=a", "-c", "user.email=a@example.com", *words)
        return subprocess.run(
            ["git", "-C", tmp_path, *words], env=own, check=True, capture_output=True, text=True
        ).stdout

    assert revision_annotations(tmp_path) == {}, "no checkout"
    git("init", "-q")
    git("remote", "add", "origin", "https://user:token@git.example.com/org/repo.git")
    (tmp_path / "file").touch()
    git("add", "file")
    git("commit", "-qm", "one")
    commit, name = git("rev-parse", "HEAD").strip(), "org.opencontainers.image"
    source = {f"{name}.source": "https://git.example.com/org/repo"}
    assert revision_annotations(tmp_path) == {f"{name}.revision": commit, **source}
    (tmp_path / "file").write_text("changed")
    assert revision_annotations(tmp_path) == {f"{name}.revision": f"{commit}-dirty", **source}


def test_the_base_is_named_by_its_digest() -> None:
    base = SimpleNamespace(config={}, reference="registry.example/base:1", digest="sha256:" + "a" * 64)
    inputs: Any = SimpleNamespace(
        base=base, producer=SimpleNamespace(name="tune", model="m"), version="1", digest="b" * 64
    )
    made = labels(inputs, WarmUp(Path(), ()))
    assert made["org.opencontainers.image.base.name"] == base.reference
    assert made["org.opencontainers.image.base.digest"] == base.digest


def test_the_summary_says_what_became_of_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        Row("a", "pushed", "r/tuned:a", "sha256:" + "1" * 64),
        Row("b", "released", "r/tuned:b", "sha256:" + "2" * 64),
        Row("c", "failed", why="it broke\x1b[2J", hint="repair it", code=6),
    )
    summary = Summary("r/tuned", rows, ("latest",))
    summary.show()
    said = capsys.readouterr().err
    assert "r/tuned: 1 pushed, 1 released, 1 failed" in said and "hint: repair it" in said and "\x1b" not in said
    assert summary.to_json()["exit_code"] == 6 and summary.to_json()["tags"] == ["latest"]
    assert Summary("r", (*rows, Row("d", "failed", code=7))).code == Exit.PUBLISH
    assert Summary("r", rows[:2]).code == 0


def test_an_interruption_does_not_wait_for_what_runs() -> None:
    """Threads that wait for a registry must not keep Ctrl-C waiting; an error waits, since the next cell goes on."""
    for wanted, waits in ((KeyboardInterrupt(), False), (ValueError(), True)):
        begun, go, ended = threading.Event(), threading.Event(), threading.Event()

        def work(
            number: int, wanted: BaseException = wanted, begun: Any = begun, go: Any = go, ended: Any = ended
        ) -> None:
            if number == 0:
                begun.wait(120)
                raise wanted
            begun.set()
            go.wait(120)
            ended.set()

        if waits:
            threading.Timer(0.2, go.set).start()
        with pytest.raises(type(wanted)):
            parallel_map(work, [0, 1], 2)
        assert ended.is_set() == waits
        go.set()


SERVED = """
[gpus.h200]
arch = "90a"
cache = "{model}"
verdict = "verdicts"
[gpus.b200]
arch = "100a"
[servers.vllm]
base_image = "vllm/vllm-openai:v0"
start = "vllm"
args = "--model /m --pipeline-parallel-size 2 --tensor-parallel-size ARGS"
[[cells]]
model = "./config.json"
tp = 2
gpu = "b200"
server = "vllm"
[[cells]]
model = "tiny"
gpu = ["h200", "b200"]
"""


def test_cells_of_a_server_have_as_many_gpus_as_its_arguments_say(tmp_path: Path) -> None:
    from pipeline.commands import release

    def jobs(arguments: str, folder: Path) -> Any:
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        cache_samples.write(folder / "tiny")
        (folder / "release.toml").write_text(SERVED.replace("ARGS", arguments))
        parser = argparse.ArgumentParser()
        release.configure_run(parser)
        words = ["--matrix", str(folder / "release.toml"), "--registry", "127.0.0.1:1"]
        return release._prepared(parser.parse_args(words))

    with pytest.raises(UsageError, match="say 4 tensor parallel ranks, and the cell 2"):
        jobs("4", tmp_path / "wrong")
    found = jobs("{tp}", tmp_path / "one")
    assert [found._gpu_count(job) for job in found.jobs] == [4, 0, 2], "baked and replayed elsewhere: none"
    moved = jobs("{tp}", tmp_path / "another-checkout")
    assert [job.inputs for job in moved.jobs][::2] == [job.inputs for job in found.jobs][::2]
