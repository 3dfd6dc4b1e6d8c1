"""Plans, records, manifests and verdicts as they are read: what is written reads back, all else is one error."""

from __future__ import annotations

import copy
import json

import cache_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contract.errors import PipelineError
from pipeline.contract.manifest import Manifest, ManifestInvalid
from pipeline.contract.plan import Plan, PlanInvalid
from pipeline.contract.record import Record, RecordInvalid
from pipeline.contract.verdict import Verdict, VerdictInvalid

MADE, _ = samples.manifest("NVIDIA H200")
VERDICT = Verdict("sha256:0", "sha256:1", "2", "k", "NVIDIA H200", "static", "pass", {"files": 2})
FILES = {
    "plan": (Plan, samples.plan(), PlanInvalid),
    "manifest": (Manifest, MADE, ManifestInvalid),
    "record": (Record, samples.record("NVIDIA H200"), RecordInvalid),
    "verdict": (Verdict, VERDICT, VerdictInvalid),
}


def written(name):
    return json.loads(json.dumps(FILES[name][1].to_json()))


def refusal(name, value):
    with pytest.raises(FILES[name][2]) as caught:
        FILES[name][0].from_json(value)
    return caught.value


def paths(value, path=()):
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(one, (*path, key))


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_reads_back(name):
    cls, made, _ = FILES[name]
    assert cls.from_json(written(name)) == made
    assert json.loads(json.dumps(cls.from_json(written(name)).to_json())) == written(name)


@pytest.mark.parametrize("name", FILES)
def test_no_value_of_another_type_passes_anywhere(name):
    for path in list(paths(written(name)))[1:]:
        value = copy.deepcopy(written(name))
        place = value
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = {"odd": [None]}
        if not {"tactic", "options"} & set(path):  # where anything may stand
            assert refusal(name, value).message, path


@pytest.mark.parametrize("name", FILES)
def test_missing_and_unknown_fields_are_named(name):
    field = {"plan": "layout", "manifest": "covered", "record": "arch", "verdict": "level"}[name]
    value = written(name)
    del value[field]
    assert f"$.{field} is missing" in refusal(name, value).message
    assert "$.more is not a field of this version" in refusal(name, {**written(name), "more": 1}).message
    for other in ([], None, 3, "x", {}):
        refusal(name, other)


def test_everything_that_is_wrong_is_named_at_once_but_not_without_end():
    value = written("manifest")
    value["covered"][1]["bucket"] = "x"
    value["plan"]["ops"][0]["buckets"] = [3, 1]
    value["record"]["host"]["gpus"] = [None]
    value["started"] = True
    assert set(refusal("manifest", value).details) == {
        "$.covered[1].bucket: x is not a whole number",
        "$.plan.ops[0].buckets: [3, 1] are not ascending positive token counts",
        "$.record.host.gpus[0]: None is not text",
        "$.started: True is not text",
    }
    value["covered"] = [{}] * 500
    assert len(refusal("manifest", value).details) == 50


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("plan", {"schema": 9}, "$.schema: 9, and this version reads 1"),
        ("plan", {"digest": "0" * 64}, "the file was edited"),
        ("plan", {"seed": -1}, "$.seed: -1"),
        ("plan", {"layout": {"tp": 4096, "ep": 1, "pp": 1, "dp": 1}}, "does not make 1 to 1024 ranks"),
        ("manifest", {"key": "../../etc"}, "$.key: "),
        ("record", {"flashinfer": {}}, "flashinfer_version is missing"),
        ("verdict", {"key": 5}, "$.key: 5 is not text"),
        ("verdict", {"level": "x"}, "$.level: x is not one of static, replay"),
        ("verdict", {"findings": ["one"]}, "a passing verdict has none"),
        ("verdict", {"replayed": ["other"]}, "a key that the verdict is not about"),
    ],
)
def test_what_no_type_says_is_checked_as_well(name, change, said):
    assert said in refusal(name, {**written(name), **change}).message


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100, b'{"schema": 1, "schema": 1}',
     b'{"schema": NaN}', b'{"schema": ' + b"9" * 5000 + b"}", b"[" + b"[]," * 4_000_001 + b"0]"],
    ids=range(10),
)  # fmt: skip
@pytest.mark.parametrize(("cls", "error"), [(Manifest, ManifestInvalid), (Verdict, VerdictInvalid)])
def test_bytes_that_are_no_object_are_one_error(cls, error, data):
    with pytest.raises(error) as caught:
        cls.load(data)
    assert "\n" not in caught.value.message


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda i: st.lists(i, max_size=3) |
                    st.dictionaries(st.text(max_size=4), i, max_size=3), max_leaves=6), st.data())  # fmt: skip
def test_any_value_anywhere_is_an_object_or_one_error(value, data):
    name = data.draw(st.sampled_from(sorted(FILES)))
    whole = written(name)
    place, key = whole, data.draw(st.sampled_from(sorted(whole)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place))) if isinstance(place, dict) else 0
    place[key] = value
    try:
        FILES[name][0].from_json(whole)
    except PipelineError as error:
        assert error.message.isprintable()
