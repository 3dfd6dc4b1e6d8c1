"""Tags, verdicts, the journal and the summary of a release."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_samples import manifest

from pipeline.contract.verdict import Verdict, VerdictInvalid
from pipeline.image.naming import gpu_of, key_of
from pipeline.registry.client import parallel_map
from pipeline.registry.errors import ReferenceInvalid
from pipeline.release.annotate import INPUTS, check_own
from pipeline.release.ask import Ask, RegistryUnnamed, inputs_of, place_from
from pipeline.release.cells import Cell
from pipeline.release.faults import AnnotationsInvalid, NotReplayed, VerdictsUnreadable
from pipeline.release.journal import Entry, Journal
from pipeline.release.names import DEFAULT, Names, TemplateInvalid, check_template, expand, pattern
from pipeline.release.outcome import Row, Summary
from pipeline.release.report import rows, show
from pipeline.release.verdicts import proofs, read_verdicts

NAMES = Names("Llama-3.1-8B", 2, "0.6.16.post3", "H200", "vLLM", "abcdef0123456789", "fedcba98765432")


def test_the_default_tag_is_what_the_documents_say() -> None:
    assert expand(DEFAULT, NAMES) == "llama-3.1-8b-tp2-h200-fi0.6.16.post3-abcdef01"
    assert check_template("{engine}_{cache}") == ["engine", "cache"]
    assert expand("{engine}_{cache}", NAMES) == "vllm_fedcba98"


def test_the_default_tag_is_never_too_long() -> None:
    long = replace(NAMES, model="M" * 300, gpu="G" * 300)
    assert len(expand(DEFAULT, long)) <= 128
    check_template(DEFAULT)


def test_a_tag_is_recognised_before_its_key_is_known() -> None:
    wanted = pattern(DEFAULT, replace(NAMES, key="", cache=""))
    assert wanted.fullmatch(expand(DEFAULT, NAMES))
    assert not wanted.fullmatch("llama-3.1-8b-tp2-h200-fi0.6.16.post3-latest")
    assert not wanted.fullmatch("llama-3.1-8b-tp4-h200-fi0.6.16.post3-abcdef01")
    assert not wanted.fullmatch("llama-3x1-8b-tp2-h200-fi0.6.16.post3-abcdef01"), "a dot is a dot"
    assert pattern(DEFAULT, replace(NAMES, key="", gpu="")).fullmatch(expand(DEFAULT, NAMES))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{modell}", "did you mean {model}?"),
        ("{model!r}", "there is no field"),
        ("{tp:>4}", "there is no field"),
        ("{}", "there is no field"),
        ("{model", "is no template"),
        ("{model}/{tp}", "gives no tag"),
        ("-{model}", "gives no tag"),
        ("x" * 129, "gives no tag"),
    ],
)
def test_templates_that_give_no_tag_are_refused(template: str, said: str) -> None:
    with pytest.raises(TemplateInvalid, match=said.replace("{", r"\{").replace("?", r"\?")):
        check_template(template)


def test_names_of_several_keys() -> None:
    one, two = manifest("NVIDIA H200")[0], manifest("NVIDIA H100 80GB HBM3")[0]
    assert gpu_of([one, two]) == "H200-H100 80GB HBM3"
    assert gpu_of([manifest()[0]]) == "cpu-x86_64"
    assert key_of([one]) == one.key.rpartition("/")[2]
    assert key_of([one, two]) not in (key_of([one]), key_of([two]))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("127.0.0.1:5000", "127.0.0.1:5000/tuned"),
        ("localhost:5000/a/b/", "localhost:5000/a/b"),
        ("registry.example/team", "registry.example/team"),
    ],
)
def test_a_registry_is_a_host_and_a_repository(text: str, name: str) -> None:
    assert place_from(text).name == name


@pytest.mark.parametrize("text", ["", "  ", "registry.example/team:tag", "registry.example/team@sha256:" + "0" * 64])
def test_what_is_no_place_for_images(text: str) -> None:
    with pytest.raises(RegistryUnnamed):
        place_from(text)


def test_a_repository_without_a_registry_is_refused() -> None:
    with pytest.raises(ReferenceInvalid):
        place_from("team/tuned")


def verdict(**change: Any) -> Verdict:
    made = Verdict(
        "sha256:" + "a" * 64,
        "sha256:" + "b" * 64,
        "c" * 64,
        "1/90a/" + "d" * 64,
        "NVIDIA H200",
        "replay",
        "pass",
        {"hits": 9},
    )
    return replace(made, **change)


def test_an_own_replay_is_proof() -> None:
    own = verdict()
    assert proofs(own, []) == (own,)
    assert proofs(own, [verdict()]) == (own,), "another that says the same adds nothing"


def test_a_verdict_of_the_host_with_the_gpu_is_proof() -> None:
    own, theirs = verdict(level="static"), verdict(device="another name")
    assert proofs(own, [verdict(config_digest="sha256:" + "0" * 64), theirs]) == (theirs,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config_digest": "sha256:" + "0" * 64}, "on image sha256:000"),
        ({"cache_diff_id": "sha256:" + "0" * 64}, "on cache layer sha256:000"),
        ({"manifest_sha256": "0" * 64}, "on manifest 000"),
        ({"result": "fail", "findings": ("it missed",)}, "failed: it missed"),
    ],
)
def test_a_verdict_on_something_else_is_none(change: dict[str, Any], said: str) -> None:
    with pytest.raises(NotReplayed, match="no replay verdict for") as caught:
        proofs(verdict(level="static"), [verdict(**change)])
    assert any(said in line for line in caught.value.details), caught.value.details
    assert "pipeline verify IMAGE --output FILE" in caught.value.hint


def test_a_static_verdict_is_no_proof() -> None:
    with pytest.raises(NotReplayed):
        proofs(verdict(level="static"), [verdict(level="static")])


def test_a_gathered_image_needs_each_key_replayed_by_somebody() -> None:
    first, second = "1/90a/" + "d" * 64, "1/90a/" + "e" * 64
    own = verdict(key=f"{first},{second}", level="static")
    on_h100, on_h200 = replace(own, replayed=(first,)), replace(own, replayed=(second,))
    with pytest.raises(NotReplayed, match="e" * 64):
        proofs(own, [on_h100])
    assert proofs(own, [on_h100, on_h200]) == (on_h100, on_h200)
    assert proofs(on_h100, [on_h200, on_h100]) == (on_h100, on_h200)
    with pytest.raises(VerdictInvalid):
        Verdict.from_json({**verdict().to_json(), "replayed": ["1/90a/" + "f" * 64]})
    failed = replace(own, result="fail", findings=("x",), replayed=(first, second))
    with pytest.raises(NotReplayed):
        proofs(own, [failed])


def test_verdicts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.json").write_text(json.dumps(verdict(device=str(number)).to_json()))
    (tmp_path / "notes.txt").write_text("no verdict")
    assert [one.device for one in read_verdicts([tmp_path, tmp_path / "1.json"])] == ["0", "1", "1"]
    for name, content in (("a.json", "{"), ("b.json", "{}"), ("c.json", "[" * 100_000)):
        (tmp_path / name).write_text(content)
        with pytest.raises(VerdictsUnreadable, match=name):
            read_verdicts([tmp_path / name])
    with pytest.raises(VerdictsUnreadable, match="No such file"):
        read_verdicts([tmp_path / "none.json"])


def test_annotations_of_the_user() -> None:
    assert check_own({"org.opencontainers.image.licenses": "Apache-2.0"})
    for name, value in ((INPUTS, "x"), ("a b", "x"), ("a=b", "x"), ("a", "x\ny")):
        with pytest.raises(AnnotationsInvalid):
            check_own({name: value})


def test_the_inputs_of_an_import_leave_the_bakers_device_out(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("1")
    ask = Ask(tmp_path, place_from("localhost:5000"))
    request: Any = SimpleNamespace(bake_jit=True)

    def inputs(cell: Cell, device: str) -> str:
        prepared: Any = SimpleNamespace(decides={"base": "b", "device": device, "options": device, "previous": ""})
        return inputs_of(ask, cell, request, prepared)

    tuned, imported = Cell("m", 1), Cell("m", 1, caches=(tmp_path / "a",))
    assert inputs(tuned, "one") != inputs(tuned, "two")
    before = inputs(imported, "one")
    assert before == inputs(imported, "two")
    (tmp_path / "a" / "file").write_text("2")
    assert inputs(imported, "one") != before


def test_the_journal_is_read_back_and_damage_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "localhost:5000/tuned", "0" * 64)
    assert journal.read() is None
    journal.write(Entry("sha256:a", "sha256:b", "tag"))
    assert journal.read() == Entry("sha256:a", "sha256:b", "tag", done=False)
    assert Journal(tmp_path, "localhost:5001/tuned", "0" * 64).read() is None
    for text in ("{", "[]", '{"image": 1, "more": 2}'):
        journal.path.write_text(text)
        assert journal.read() is None


def test_the_exit_code_of_a_release() -> None:
    def code(*codes: int) -> int:
        return Summary("r", tuple(Row("c", "failed" if one else "pushed", code=one) for one in codes)).code

    assert code() == code(0, 0) == 0
    assert code(0, 7) == code(7, 7) == 7
    assert code(6, 7) == 8


def test_the_summary_says_what_became_of_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary(
        "r/tuned",
        (
            Row("a", "pushed", "r/tuned:a", "sha256:" + "1" * 64, moved=("latest",)),
            Row("b", "skipped", "r/tuned:b", "sha256:" + "2" * 64, why="the same inputs"),
            Row("c", "failed", why="it broke\x1b[2J", hint="mend it", code=6),
        ),
    )
    assert rows(summary)[0] == ("a", "pushed", "r/tuned:a", "sha256:111111111111; also latest")
    show(summary)
    said = capsys.readouterr().err
    assert "r/tuned: 1 pushed, 1 skipped, 1 failed" in said
    assert "hint: mend it" in said
    assert "\x1b" not in said
    told = summary.to_json()
    assert (told["pushed"], told["skipped"], told["failed"], told["exit_code"]) == (1, 1, 1, 6)
    assert [cell["status"] for cell in told["cells"]] == ["pushed", "skipped", "failed"]


def test_an_interruption_does_not_wait_for_what_runs() -> None:
    """Threads that sit out a registry must not keep Ctrl-C waiting; an error waits, since the next cell goes on."""
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
