"""Whole releases against a real registry: cells, runs, finishes. The engine's part is played by small images."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from release_registries import NOBODY, QUICK
from release_samples import SampleImage, inspect

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import DockerError, Exit, UsageError, WarmUpError
from pipeline.contract.plan import Layout
from pipeline.image.request import Request
from pipeline.registry.client import Registry
from pipeline.registry.reference import Reference
from pipeline.release import run
from pipeline.release.cosign import Signer, Verifier
from pipeline.release.matrix import Cell
from pipeline.release.run import Job, Options, Release
from pipeline.release.verify import examine


class Host:
    """A host that releases: `images` by the cells' names; `engine` False is one without a Docker Engine."""

    def __init__(self, folder, monkeypatch, registry, repository):
        self.folder, self.patch = folder, monkeypatch
        self.place = Reference(registry, repository)
        self.images, self.fail, self.engine, self.built = {}, {}, True, []
        self.move_in("home")
        monkeypatch.setattr(run, "engine", self.running_engine)
        monkeypatch.setattr(run, "build", self.build)
        monkeypatch.setattr(run, "Registry", lambda name: Registry(name, NOBODY, QUICK))

    def move_in(self, name):
        self.patch.setenv("XDG_CACHE_HOME", str(self.folder / name))

    @contextlib.contextmanager
    def running_engine(self):
        if not self.engine:
            raise DockerError("no Docker Engine answers")
        yield None

    def build(self, session, request, cell):
        self.built.append(cell.name)
        if cell.name in self.fail:
            raise self.fail[cell.name]
        return self.images[cell.name]

    def release(self, *cells, **options):
        jobs = [
            Job(
                cell,
                Request(
                    self.folder,
                    cell.model,
                    plan=SimpleNamespace(layout=Layout(cell.tp)),
                    device="cuda" if cell.gpus else "cpu",
                ),
                sha256_bytes(cell.name.encode()),
            )
            for cell in cells
        ]
        return Release(Options(self.place, **{"template": "{model}-tp{tp}-{key}", **options}), jobs)

    def cell(self, model, tactic=3, platform=""):
        name = f"{model}-tp2" + (f"-{platform}" if platform else "")
        folder = self.folder / f"{name}"
        folder.mkdir(exist_ok=True)
        self.images[name] = SampleImage(folder, tactic=tactic, platform=platform or "amd64")
        return Cell(name, model, 2, platform=platform)


@pytest.fixture
def host(faulty, tmp_path, monkeypatch, request):
    return Host(tmp_path, monkeypatch, faulty.host, f"run/{abs(hash(request.node.name)):x}")


@pytest.fixture
def registry(host):
    with Registry(host.place.registry, NOBODY, QUICK) as one:
        yield one


def statuses(release):
    return [row.status for row in release.summary().rows]


def test_a_failing_cell_stops_no_other_and_a_second_run_needs_no_engine(host, registry):
    cells = [host.cell("a"), host.cell("b"), host.cell("c", tactic=5)]
    host.fail["b-tp2"] = WarmUpError("it hung", hint="wait longer")
    first = host.release(*cells)
    first.run([])
    assert statuses(first) == ["pushed", "failed", "pushed"] and first.summary().code == Exit.WARM_UP
    assert first.summary().rows[1].hint == "wait longer"
    host.engine = False
    again = host.release(cells[0], cells[2])
    again.run([])
    assert statuses(again) == ["released", "released"] and again.summary().code == 0
    assert [row.image for row in again.summary().rows] == [first.summary().rows[at].image for at in (0, 2)]
    host.move_in("elsewhere")  # a host that knows nothing finds them by their inputs
    fresh = host.release(*cells)
    fresh.run([], dry_run=True)
    assert statuses(fresh) == ["released", "would push", "released"]


def test_cells_say_what_each_needs_and_what_the_registry_has(host, registry):
    cells = [host.cell("a"), Cell("b-tp4-h200", "b", 4, ("h200",), ("NVIDIA H200",))]
    host.release(cells[0]).run([])
    host.engine = False
    rows = host.release(*cells).cells(registry, ["pipeline", "release", "run"])
    assert [(row["name"], row["device"], row["released"]) for row in rows] == [
        ("a-tp2", "a CPU", True), ("b-tp4-h200", "NVIDIA H200", False),
    ]  # fmt: skip
    assert [(row["gpu"], row["gpu_count"]) for row in rows] == [("", 0), ("h200", 4)]
    assert rows[1]["command"] == ["pipeline", "release", "run", "--cell", "b-tp4-h200"]
    with pytest.raises(UsageError, match="there is no cell c"):
        host.release(*cells).run(["c"])


def test_a_run_that_was_cut_off_before_its_tag_gets_it_without_an_engine(host, registry, faulty):
    cell = host.cell("a")
    fault = faulty.fail(method="PUT", path="/manifests/a-tp2", status=500)
    cut = host.release(cell)
    cut.run([])
    assert statuses(cut) == ["failed"] and cut.summary().code == Exit.PUBLISH
    faulty.faults.remove(fault)
    host.engine = False
    again = host.release(cell)
    again.run([])
    (row,) = again.summary().rows
    assert (
        row.status == "released" and registry.resolve(host.place.repository, row.image.rpartition(":")[2]) == row.digest
    )


def test_what_somebody_put_under_the_inputs_tag_does_not_count(host, registry, keys, other_keys):
    """Anyone who may push can write that tag: only an image with these inputs, attachments and our signature counts."""
    cell, other = host.cell("a"), host.cell("other", tactic=5)
    host.release(other).run([])
    (theirs,) = host.release(other).cells(registry, [])
    job = host.release(cell).jobs[0]
    registry.put_manifest(host.place.repository, registry.manifest(host.place.repository, theirs["digest"]), f"inputs-{job.inputs}")  # fmt: skip
    assert [row["released"] for row in host.release(cell).cells(registry, [])] == [False]
    host.release(cell).run([])
    assert [row["released"] for row in host.release(cell).cells(registry, [])] == [True]
    signer = Signer(str(keys[0]))
    assert [row["released"] for row in host.release(cell, signer=signer).cells(registry, [])] == [False]
    signed = host.release(cell, signer=signer)
    signed.run([])
    assert statuses(signed) == ["pushed"]
    host.engine = False
    signed.finish()
    assert statuses(signed) == ["pushed"], "a run that finishes still says what it pushed"
    again = host.release(cell, signer=signer)
    again.run([])
    assert statuses(again) == ["released"]
    theirs = Signer(str(other_keys[0]))
    assert [row["released"] for row in host.release(cell, signer=theirs).cells(registry, [])] == [False]


def test_platforms_become_one_index_when_all_are_there(host, registry, keys):
    signer, public = Signer(str(keys[0])), Verifier(str(keys[1]))
    cells = [host.cell("a", platform="amd64"), host.cell("a", platform="arm64")]
    options = {"signer": signer, "floating": ("{model}-latest",)}
    host.release(*cells, **options).run(["a-tp2-amd64"])
    early = host.release(*cells, **options)
    early.finish()
    assert early.summary().code == Exit.PUBLISH and statuses(early) == ["released", "failed"]
    assert "run … --cell NAME" in early.summary().rows[1].hint and early.tags == []
    assert registry.resolve(host.place.repository, "a-latest") is None
    host.move_in("another host")
    host.release(*cells, **options).run(["a-tp2-arm64"])
    host.engine = False
    done = host.release(*cells, **options)
    done.finish()
    assert done.summary().code == 0 and len(done.tags) == 2, done.summary()
    (digest,) = {row.digest for row in done.summary().rows}
    assert registry.resolve(host.place.repository, "a-latest") == digest
    index = inspect(f"{host.place.name}@{digest}")
    assert [e["platform"]["architecture"] for e in index["manifests"]] == ["amd64", "unknown", "arm64", "unknown"]
    found = examine(registry, host.place.tagged("a-latest"), public)
    assert found.complete and len(found.answers) == 11, found.answers
    again = host.release(*cells, **options)
    again.finish()
    assert again.tags == [] and {row.digest for row in again.summary().rows} == {digest}


def test_a_finish_names_every_cell_that_is_missing(host, registry):
    cells = [host.cell("a"), host.cell("b"), host.cell("c")]
    host.release(*cells).run(["a-tp2"])
    host.engine = False
    done = host.release(*cells, floating=("{model}-latest",))
    done.finish()
    assert done.summary().code == Exit.PUBLISH and statuses(done) == ["released", "failed", "failed"]
    assert done.tags == ["a-latest"]


@pytest.mark.parametrize("hosts", ["one", "several"])
def test_cells_run_side_by_side(host, registry, monkeypatch, hosts):
    if hosts == "several":
        monkeypatch.setattr(run, "cache_home", lambda: host.folder / threading.current_thread().name)
    cells = [host.cell("a"), host.cell("b", tactic=5)]
    runs = [host.release(*cells) for _ in range(4)]
    threads = [
        threading.Thread(target=one.run, args=([name],))
        for one, name in zip(runs, ["a-tp2", "b-tp2", "a-tp2", "b-tp2"], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    ended = sorted(row.status for one in runs for row in one.summary().rows if row.status != "interrupted")
    if hosts == "one":
        assert ended == ["pushed", "pushed", "released", "released"], "one does it, the other waits and sees it"
    else:
        assert len(ended) == 4 and set(ended) <= {"pushed", "released"}, "both may do it; one result gets the tag"
    done = host.release(*cells)
    done.finish()
    assert done.summary().code == 0
    for row in done.summary().rows:
        answers = examine(registry, host.place.at(row.digest)).answers
        assert {a.name for a in answers if a.state != "ok"} == {"signature"}, answers


def test_a_registry_that_may_only_be_read_is_refused_before_any_work(host, faulty):
    faulty.fail(method="POST", path="/blobs/uploads/", status=405)
    refused = host.release(host.cell("a"))
    refused.run([])
    assert statuses(refused) == ["failed"] and "may be pushed to" in refused.summary().rows[0].why
    assert host.built == []


def test_nothing_is_published_without_a_replay_verdict(host, registry, tmp_path):
    cell = host.cell("a")
    image = host.images["a-tp2"]
    whole, image.verdict = image.verdict, replace(image.verdict, level="static")
    refused = host.release(cell)
    refused.run([])
    assert "no replay verdict" in refused.summary().rows[0].why and refused.summary().code == Exit.PUBLISH
    given = tmp_path / "verdicts" / "gpu-host.json"
    given.parent.mkdir()
    given.write_text(json.dumps(replace(whole, identity="sha256:" + "0" * 64).to_json()))
    host.release(cell, verdicts=(given.parent,)).run([])
    assert registry.resolve(host.place.repository, "a-tp2-" + whole.key.rpartition("/")[2][:8]) is None
    given.write_text(json.dumps(whole.to_json()))
    done = host.release(cell, verdicts=(given.parent,))
    done.run([])
    assert statuses(done) == ["pushed"]


def test_what_a_servers_start_made_is_released_by_its_second_start(host, registry, keys, other_keys):
    """It has no FlashInfer key: no manifest to attach, and the verdict is of what its own start left."""
    cell = host.cell("a")
    host.images["a-tp2"] = SampleImage(host.folder, server="vllm")
    signer = Signer(str(keys[0]))
    done = host.release(cell, signer=signer)
    done.run([])
    assert statuses(done) == ["pushed"] and done.summary().rows[0].image.endswith(":a-tp2-eeeeeeee"), done.summary()
    found = examine(registry, host.place.at(done.summary().rows[0].digest), Verifier(str(keys[1])))
    assert found.complete, found.answers
    host.engine = False
    again = host.release(cell, signer=signer)
    again.run([])
    assert statuses(again) == ["released"]
    unproven = examine(registry, host.place.at(done.summary().rows[0].digest), Verifier(str(other_keys[1])))
    assert {a.name for a in unproven.answers if a.state == "wrong"} == {"signature", "verdict", "sbom", "server"}
