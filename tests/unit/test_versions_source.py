"""versions.json: what is read, and every slip with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from versions_trees import source, texts

from pipeline.versions import SourceInvalid, load
from pipeline.versions.located_json import parse, plain
from pipeline.versions.source import read

ROOT = Path(__file__).resolve().parents[2]


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(SourceInvalid) as caught:
        read(text if isinstance(text, bytes) else text.encode())
    assert caught.value.exit_code == 2
    return texts(caught.value.findings)


def test_our_own_file_is_read_in_its_order() -> None:
    versions = load(ROOT)
    assert list(versions)[:2] == ["FLASHINFER_VERSION", "TORCH_VERSION"]
    assert versions["BASE_IMAGE"] == f"python:{versions['PYTHON_IMAGE_VERSION']}-slim-{versions['DEBIAN_SUITE']}"
    assert versions.governors()["flashinfer-jit-cache"] == "FLASHINFER_VERSION"
    assert versions.governors()["typing-extensions"] == "TYPING_EXTENSIONS_VERSION"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "versions.json:1:1: ends where a value is expected"),
        ("[]", "versions.json:1:1: the document must be an object"),
        ("{}", 'versions.json:1:1: there is no "variable"'),
        ('{"variable": {}} x', "versions.json:1:18: text after the end of the document"),
        ('{"variable": {\n  "A": {"default": "1"},\n}}', 'versions.json:2:24: trailing comma before "}"'),
        ('{"variable": {"A": {"default": "1"}\n "B": {}}}', 'versions.json:2:2: "," or "}" is expected here'),
        ('{"variable": {"A": {"default": "1"', 'versions.json:1:34: "}" is missing at the end'),
        (
            '{"variable": {"A": {"default": 1}}}',
            'versions.json:1:32: the value of "A" must be a string in double quotes',
        ),
        ('{"variable": {"A": {"default": null}}}', 'versions.json:1:32: the value of "A" must be a string in double'),
        ('{"variable": {"A": {"default": NaN}}}', "versions.json:1:32: NaN is not JSON"),
        ('{"variable": {"A": {"default": ""}}}', 'versions.json:1:32: the value of "A" is empty'),
        ('{"variable": {"A": {"default": " 1"}}}', 'versions.json:1:32: the value of "A" has a quote'),
        ('{"variable": {"A": {"default": "$X"}}}', 'versions.json:1:32: the value of "A" has a quote, $'),
        ('{"variable": {"A": {"default": "${X}"}}}', 'versions.json:1:32: "A" names ${X}, which has no version'),
        ('{"variable": {"A": {"default": "${A}"}}}', 'versions.json:1:32: "A" names ${A}, which leads back to it'),
        ('{"variable": {"A": {}}}', 'versions.json:1:15: "A" has no "default"'),
        ('{"variable": {"A": "1"}}', 'versions.json:1:20: "A" must be an object'),
        ('{"variable": {"A": {"defualt": "1"}}}', 'unknown key "defualt" in "A"; did you mean "default"?'),
        ('{"variables": {}}', 'unknown key "variables"; did you mean "variable"?'),
        ('{"variable": {"1A": {"default": "1"}}}', '"1A" is not a name that an ARG can have'),
        ('{"variable": {"A-B": {"default": "1"}}}', '"A-B" is not a name that an ARG can have'),
        ('{"variable": {"A": {"default": "1"}}, "relations": {"B": {}}}', 'relation of "B", which has no version'),
        (
            source({"TORCH_VERSION": "1"}, {"TORCH_VERSON": {}}),
            'relation of "TORCH_VERSON", which has no version; did you mean "TORCH_VERSION"?',
        ),
        (source({"A": "1"}, {"A": {"pakages": ["a"]}}), 'unknown key "pakages" in the relation of "A"; did you mean'),
        (source({"A": "1"}, {"A": {"packages": [1]}}), '"packages" of "A" must be a list of strings'),
        (source({"A": "1"}, {"A": {"git_ref": "v"}}), '"git_ref" of "A" must hold {} once'),
        (source({"A": "1"}, {"A": {"local_label": "cu{bad}"}}), '"local_label" of "A" may hold {major}'),
        (source({"A": "1"}, {"A": {"extends": "B"}}), '"A" is tied to "B", which is no other name here'),
        (source({"A": "1"}, {"A": {"same_as": "A"}}), '"A" is tied to "A", which is no other name here'),
        (source({"A": "1", "B": "1"}, {"A": {"packages": ["x"]}, "B": {"packages": ["X"]}}), '"x" is governed by both'),
        (source({"A": "1.x"}, {"A": {"packages": ["a"]}}), '"1.x" of "A" is not a version (PEP 440), and it governs'),
        (source({"A": "1"}, None, {"requirements/x.txt": "torch"}), "must be a list of distributions"),
        ('{"variable": {}, "unmanaged": "A"}', '"unmanaged" must be a list of names'),
        ("\ufeff" + source({"A": "1"}), "versions.json:1:1: begins with a byte order mark"),
        (b'{"variable": {\n"A": {"default": "\xff"}}}', "versions.json:2:19: is not UTF-8 from here on"),
        ("[" * 100000, "nested too deeply"),
    ],
)
def test_a_slip_has_its_place(text: str | bytes, expected: str) -> None:
    found = problems(text)
    assert any(expected in line for line in found), found


def test_all_slips_at_once() -> None:
    found = problems(
        '\ufeff{"variable": {\n'
        '  "A": {"default": 1},\n'
        '  "A": {"default": "2"},\n'
        '  "B-C": {"default": "2"},\n'
        '  "D": {"defalt": "2"},\n'
        '}, "relation": {}}'
    )
    assert [line.partition(": ")[0] for line in found] == [
        "versions.json:1:1",
        "versions.json:2:20",
        "versions.json:3:3",
        "versions.json:4:3",
        "versions.json:5:3",
        "versions.json:5:9",
        "versions.json:5:23",
        "versions.json:6:4",
    ]
    assert 'duplicate name "A", first on line 2' in found[2]


def test_a_missing_or_unreadable_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match="there is no"):
        load(tmp_path)
    (tmp_path / "versions.json").mkdir()
    with pytest.raises(SourceInvalid, match="cannot be read"):
        load(tmp_path)


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_no_text_makes_it_raise_anything_else(text: str) -> None:
    try:
        read(text.encode("utf-8", "surrogatepass"))
    except SourceInvalid as error:
        assert error.findings


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet='{}[]":,\\ \n1ae', max_size=80))
def test_no_near_json_makes_it_raise_anything_else(text: str) -> None:
    try:
        read(('{"variable": ' + text).encode())
    except SourceInvalid as error:
        assert all(finding.line >= 1 and finding.column >= 1 for finding in error.findings)


def test_names_that_name_each_other_without_end_are_refused_at_once() -> None:
    def doubling(depth: int, last: str) -> str:
        return source({f"A{n}": f"${{A{n + 1}}}${{A{n + 1}}}" for n in range(depth)} | {f"A{depth}": last})

    assert read(doubling(8, "1").encode())["A0"] == "1" * 256
    assert any('the value of "A27" has more than 4096 characters' in text for text in problems(doubling(40, "1")))
    assert any("leads back to it" in text for text in problems(doubling(30, "${A0}")))
    chain = source({f"A{n}": f"${{A{n + 1}}}" for n in range(2000)} | {"A2000": "1"})
    assert any("stands behind too many other names" in text for text in problems(chain))


def test_the_quick_reading_of_json_says_what_the_exact_one_says() -> None:
    for text in ('{"a": [1, "x\\u00e9", null, -1.5e3, {"b": true}]}', "[]", '"a"'):
        assert plain(text) == json.loads(text)
    for text in ('{"a": 1, "a": 2}', "[NaN]", '"\\ud800"', "[1,]", "\ufeff{}", "1" * 2000, "[" * 100_000):
        assert plain(text) is None
        assert parse(text).problems
