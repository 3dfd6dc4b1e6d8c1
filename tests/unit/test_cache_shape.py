"""The committed JSON Schemas say what the dataclasses say, and values are checked against them on reading."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import cache_samples as samples
import pytest

from pipeline.cache.shape import FILES, schema, violations
from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import Plan
from pipeline.contract.record import Record
from pipeline.contract.verdict import Verdict

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schema"
MADE, _ = samples.manifest("NVIDIA H200")
VALUES = {
    "plan": samples.plan().to_json(),
    "manifest": MADE.to_json(),
    "record": samples.record("NVIDIA H200").to_json(),
    "verdict": Verdict("sha256:0", "sha256:1", "2", "k", "NVIDIA H200", "static", "pass", {"files": 2}).to_json(),
}
READERS = {"plan": Plan, "manifest": Manifest, "record": Record, "verdict": Verdict}


def written(name):
    return json.loads(json.dumps(VALUES[name]))


@pytest.mark.parametrize("name", FILES)
def test_the_committed_schema_is_the_dataclass(name):
    path = SCHEMAS / f"{name}.json"
    spelled = json.dumps(schema(name), indent=2) + "\n"
    assert path.read_text() == spelled, "python -m pipeline.cache.shape docs/schema"


def test_every_committed_schema_has_a_file():
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_fits_and_reads_back(name):
    assert violations(name, written(name)) == []
    again = READERS[name].from_json(written(name))
    assert json.loads(json.dumps(again.to_json())) == written(name)


def paths(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from paths(one, (*path, key))


@pytest.mark.parametrize("name", FILES)
def test_no_value_of_another_type_passes_where_the_schema_names_one(name):
    """Put something odd at every place of a sound file: it is refused, or lies where anything may stand."""
    free = {"tactic", "options"}  # Any
    for path in list(paths(written(name)))[1:]:
        value = copy.deepcopy(written(name))
        place = value
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = {"odd": [None]}
        if not free & set(path):
            assert violations(name, value), path


@pytest.mark.parametrize("name", FILES)
def test_missing_and_unknown_fields_are_named(name):
    for field in schema(name)["required"]:
        value = written(name)
        del value[field]
        assert violations(name, value) == [f"$.{field} is missing"]
    assert violations(name, {**written(name), "more": 1}) == ["$.more is not a field of this version"]
    assert violations(name, []) and violations(name, None)


def test_all_violations_at_once_but_not_without_end():
    value = written("manifest")
    value["covered"] = [{}] * 500
    assert len(violations("manifest", value)) == 50
    assert violations("verdict", {**written("verdict"), "level": "x", "result": 3, "schema": 9}) == [
        "$.schema: 9 is not 1",
        "$.level: x is not one of static, replay",
        "$.result: 3 is not one of pass, fail",
    ]
    assert violations("manifest", {**written("manifest"), "started": True}) == ["$.started: True is not of type string"]
