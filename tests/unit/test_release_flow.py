"""A release as a whole, without engine and registry: what one cell's failure, an interruption and a clash do to the others."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commands import release as command
from pipeline.contract.errors import BuildError, DockerError, PipelineError, WarmUpError
from pipeline.daemon import NoEngine
from pipeline.registry.errors import RegistryError, Unauthorized
from pipeline.release import flow
from pipeline.release.ask import Ask, place_from
from pipeline.release.cells import Cell
from pipeline.release.faults import CachesOfAnother, TagsClash
from pipeline.release.lookup import Shelf, There
from pipeline.release.names import TemplateInvalid
from pipeline.release.outcome import Row

DIGEST = "sha256:" + "d" * 64


class StubRegistry:
    """A registry that holds nothing; `refuses` is what it answers to who begins an upload."""

    refuses: PipelineError | None = None
    asked = 0

    def check_writable(self, _repository: str) -> None:
        StubRegistry.asked += 1
        if self.refuses is not None:
            raise self.refuses

    def __init__(self, host: str) -> None:
        self.host = host

    def __enter__(self) -> StubRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def tags(self, _repository: str) -> tuple[str, ...]:
        return ()

    def resolve(self, _repository: str, _tag: str) -> str:
        return DIGEST


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Everything that a release calls, played; `there` holds the models that are released already."""
    played = SimpleNamespace(there={}, fail={}, prepared=[], done=[], engine=SimpleNamespace(host="unix:///x"))

    def prepare(request: Any, *_: object) -> Any:
        played.prepared.append(request.model)
        if isinstance(played.fail.get(f"prepare {request.model}"), BaseException):
            raise played.fail[f"prepare {request.model}"]
        plan = SimpleNamespace(
            model=request.model, device="cpu", arch="cpu-x86_64", flashinfer_version="1.0", layout=SimpleNamespace(tp=1)
        )
        return SimpleNamespace(plan=plan, decides={"model": request.model}, gpus=SimpleNamespace(gpus=()), client=None)

    def one(self: Any, _registry: object, job: Any) -> Row:
        played.done.append(job.cell.model)
        if job.cell.model in played.fail:
            raise played.fail[job.cell.model]
        return Row(job.cell.title, "pushed", image=f"r/{job.cell.model}", digest=DIGEST)

    def find(_self: Shelf, _template: str, names: Any, _journal: object) -> There | None:
        found = played.there.get(names.model)
        if isinstance(found, PipelineError):
            raise found
        return found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flow, "Registry", StubRegistry)
    monkeypatch.setattr(StubRegistry, "asked", 0)
    monkeypatch.setattr(flow, "connected", lambda _engine: contextlib.nullcontext())
    monkeypatch.setattr(flow, "prepare", prepare)
    monkeypatch.setattr(flow.Release, "_engine", lambda _self: played.engine)
    monkeypatch.setattr(flow.Release, "_one", one)
    monkeypatch.setattr(Shelf, "find", find)
    monkeypatch.setattr(flow, "_base_is_here", lambda *_: True)
    return played


def release(*models: str, **more: Any) -> flow.Release:
    request: Any
    cells = []
    for model in models:
        request = SimpleNamespace(model=model, bake_jit=True)
        cells.append((Cell(model, 1), request))
    return flow.Release(Ask(Path(), place_from("localhost:5000"), **more), cells)


def statuses(run: flow.Release) -> list[str]:
    return [row.status for row in run.summary().rows]


def test_a_failing_cell_stops_no_other(stage: Any) -> None:
    stage.fail = {
        "b": WarmUpError("it hung", hint="wait longer"),
        "prepare c": BuildError("no base"),
        "d": OSError(28, "No space left on device", "/cache"),
    }
    run = release("a", "b", "c", "d", "e")
    run.run()
    assert statuses(run) == ["pushed", "failed", "failed", "failed", "pushed"]
    rows = run.summary().rows
    assert [row.code for row in rows] == [0, 6, 5, 2, 0]
    assert (rows[1].why, rows[1].hint) == ("it hung", "wait longer")
    assert rows[3].why == "/cache: No space left on device"
    assert run.summary().code == 8, "the codes differ"


def test_a_registry_that_takes_nothing_is_told_before_any_work(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.there = {"b": There("t", DIGEST)}
    monkeypatch.setattr(StubRegistry, "refuses", RegistryError("read-only", hint="ask its owner"))
    run = release("a", "b", "c")
    run.run()
    assert (statuses(run), stage.done, run.summary().code) == (["failed", "skipped", "failed"], [], 8)
    assert {(row.why, row.hint) for row in run.summary().rows if row.status == "failed"} == {
        ("read-only", "ask its owner")
    }
    assert StubRegistry.asked == 1
    release("b").run()
    release("a", "b", dry_run=True).run()
    assert StubRegistry.asked == 1, "who pushes nothing begins no upload"


def test_an_error_of_the_engine_is_the_cells(stage: Any) -> None:
    from docker.errors import APIError

    stage.fail = {"a": APIError("it stopped")}
    run = release("a", "b")
    run.run()
    assert statuses(run) == ["failed", "pushed"]
    assert run.summary().rows[0].code == 4


def test_what_is_released_is_neither_built_nor_pushed(stage: Any) -> None:
    stage.there = {"a": There("tag-a", DIGEST)}
    run = release("a", "b", moves=("latest-{model}",))
    run.run()
    assert statuses(run) == ["skipped", "pushed"]
    assert stage.done == ["b"]
    assert run.summary().rows[0].image == "localhost:5000/tuned:tag-a"
    again = release("a", again=True)
    again.run()
    assert statuses(again) == ["pushed"], "tuned again although it is there"


def test_a_registry_that_fails_for_one_cell_fails_that_cell(stage: Any) -> None:
    stage.there = {"a": RegistryError("it said nothing"), "b": There("t", DIGEST)}
    run = release("a", "b", "c")
    run.run()
    assert statuses(run) == ["failed", "skipped", "pushed"]
    assert stage.done == ["c"], "a cell that could not be looked up is not built"


def test_an_interruption_leaves_a_summary(stage: Any) -> None:
    stage.fail = {"b": KeyboardInterrupt()}
    run = release("a", "b", "c")
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert statuses(run) == ["pushed", "interrupted", "interrupted"]
    assert stage.done == ["a", "b"]


def test_a_dry_run_does_nothing(stage: Any) -> None:
    stage.there = {"a": There("tag-a", DIGEST)}
    run = release("a", "b", dry_run=True)
    run.run()
    assert statuses(run) == ["skipped", "would push"]
    assert run.summary().rows[1].image == "localhost:5000/tuned:b-tp1-cpu-x86-64-fi1.0-*"
    assert stage.done == []


@pytest.mark.parametrize("moves", [("latest",), ("{model}-latest", "newest")])
def test_two_cells_that_would_move_one_tag_are_refused(stage: Any, moves: tuple[str, ...]) -> None:
    with pytest.raises(TagsClash, match="would both move"):
        release("a", "b", moves=moves).run()
    assert stage.done == []


def test_a_moving_tag_is_never_a_releases_own(stage: Any) -> None:
    with pytest.raises(TagsClash, match="release's own tag"):
        release("a", moves=("{model}-tp1-cpu-x86-64-fi1.0-00000000",)).run()


@pytest.mark.parametrize(
    "more", [{"template": "{engine}"}, {"moves": ("{engine}-latest",)}, {"moves": ("x" * 99 + "{model}",)}]
)
def test_templates_that_give_a_cell_no_tag_are_told_before_any_work(stage: Any, more: dict[str, Any]) -> None:
    with pytest.raises(TemplateInvalid, match="gives no tag for"):
        release("a" * 40, **more).run()
    assert stage.done == []


def test_a_registry_that_refuses_us_is_told_before_any_work(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tags(_self: object, _repository: str) -> tuple[str, ...]:
        raise Unauthorized("it wants a password")

    monkeypatch.setattr(StubRegistry, "tags", tags)
    with pytest.raises(Unauthorized):
        release("a").run()
    assert stage.prepared == []


def test_imported_caches_must_be_what_the_cell_is_named_after() -> None:
    from cache_samples import manifest

    made = manifest("NVIDIA H200")[0]
    prepared: Any = SimpleNamespace(plan=made.plan)
    job = flow._Job(0, Cell("tiny", 2, caches=(Path("c"),), devices=("NVIDIA H200",)), None, prepared, None, None)  # type: ignore[arg-type]
    flow._refuse_strangers(job, [made])
    with pytest.raises(CachesOfAnother, match="tuned on NVIDIA H100, not on NVIDIA H200"):
        flow._refuse_strangers(job, [made, manifest("NVIDIA H100")[0]])
    prepared.plan = SimpleNamespace(model="other", layout=made.plan.layout)
    with pytest.raises(CachesOfAnother, match="was tuned for tiny"):
        flow._refuse_strangers(job, [made])


def test_a_dry_run_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import pipeline.daemon as room

    started: list[str] = []

    def up(store: str) -> Any:
        started.append(store)
        raise DockerError("the classic store", hint="daemon up --store containerd")

    monkeypatch.setitem(room.__dict__, "find", lambda: None)
    monkeypatch.setitem(room.__dict__, "up", up)
    with pytest.raises(NoEngine):
        release("a", dry_run=True)._engine()
    assert started == []
    with pytest.raises(DockerError, match="classic"):
        release("a")._engine()
    assert started == ["containerd"]


def asked(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command._asked(parser.parse_args(words))


def test_settings_are_judged_before_any_work(tmp_path: Path) -> None:
    matrix = tmp_path / "release.toml"
    matrix.write_text('registry = "localhost:5000/a"\nmove = "{model}"\n[[cells]]\nmodel = "tiny"\ntp = [1, 2]\n')
    ask, cells = asked("--matrix", str(matrix))
    assert (ask.place.name, ask.moves) == ("localhost:5000/a", ("{model}",))
    assert [cell.tp for cell, _ in cells] == [1, 2]
    assert [request.plan(None, "").layout.tp for _, request in cells] == [1, 2]
    ask, cells = asked("tiny", "--registry", "localhost:5000", "--move-tag", "x", "--buckets", "1,8")
    assert (ask.place.name, ask.moves) == ("localhost:5000/tuned", ("x",))
    assert cells[0][1].plan(None, "").ops[0].buckets == (1, 8)
    matrix.write_text('[[cells]]\nmodel = ["tiny", "tini"]\ntp = [1, 3]\n')
    with pytest.raises(PipelineError) as caught:
        asked("--matrix", str(matrix), "--registry", "localhost:5000")
    assert len(caught.value.details) == 3, "every cell that cannot be planned is named"


def test_a_cache_that_is_missing_fails_its_cell_alone(tmp_path: Path) -> None:
    matrix = tmp_path / "release.toml"
    matrix.write_text('[[cells]]\nmodel = "tiny"\n[[cells]]\nmodel = "tiny"\ntp = 1\ncache = "nowhere"\n')
    _, cells = asked("--matrix", str(matrix), "--registry", "localhost:5000", "--retune")
    assert cells[0][1].retune
    assert isinstance(cells[1][1], PipelineError) and "nowhere is not a directory" in cells[1][1].message


def test_a_cell_that_comes_with_an_error_fails_with_it(stage: Any) -> None:
    run = release("a", "b")
    run.cells[0] = (run.cells[0][0], BuildError("its cache is unsound"))  # type: ignore[index]
    run.run()
    assert statuses(run) == ["failed", "pushed"]


def test_the_command_shows_how_far_it_came(
    stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_asked", lambda _arguments: (release("a").ask, release("a", "b").cells))
    stage.fail = {"b": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        command.execute(SimpleNamespace(json=True))  # type: ignore[arg-type]
    said = capsys.readouterr()
    assert [row["status"] for row in json.loads(said.out)["cells"]] == ["pushed", "interrupted"]
    assert "1 pushed, 1 interrupted" in said.err
    stage.fail = {"b": WarmUpError("x")}
    assert command.execute(SimpleNamespace(json=False)) == 6  # type: ignore[arg-type]
