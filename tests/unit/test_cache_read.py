"""Reading and judging cache files: the cases, each kind of damage, and any bytes at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cache import finding
from pipeline.cache.entrykey import EntryKey, op_and_runner, parse_key
from pipeline.cache.judge import judge_source
from pipeline.cache.read import CacheUnsound, inspect_cache, read_cache
from pipeline.contract import strictjson
from pipeline.contract.errors import CacheRefused

CASES = Path(__file__).parents[1] / "cases" / "caches"
EXPECTED = json.loads((CASES / "expected.json").read_text())
HERE = EXPECTED["_environment"]["metadata"]
REAL = json.loads((CASES / "h200_real.json").read_text())
KEY = "('bf16_gemm', 'R', ((16, 8), (8, 8)), ())"


def file_of(**top):
    return json.dumps({"_metadata": HERE, KEY: ["R", 3], **top}).encode()


def test_all_case_files_have_an_answer():
    assert {path.stem for path in CASES.glob("*.json")} - {"expected"} == set(EXPECTED) - {"_environment"}


@pytest.mark.parametrize(
    ("data", "because"),
    [
        (b"", strictjson.NOT_JSON),
        (b"{", strictjson.NOT_JSON),
        (b"\xef\xbb\xbf{}", strictjson.NOT_JSON),
        (b"\xff\xfe{\x00}\x00", strictjson.NOT_UTF8),
        (b'{"a": "\xff"}', strictjson.NOT_UTF8),
        (b"[" * 100_000, strictjson.TOO_DEEP),
        (b'{"a":' * 100 + b"1" + b"}" * 100, strictjson.TOO_DEEP),
        (b"[]", strictjson.NOT_AN_OBJECT),
        (b"null", strictjson.NOT_AN_OBJECT),
        (b"3", strictjson.NOT_AN_OBJECT),
        (b'{"a": ' + b"9" * 5000 + b"}", strictjson.NOT_JSON),
        (b"[" + b"0," * 4_000_001 + b"0]", strictjson.TOO_LARGE),
    ],
)
def test_bytes_that_hold_no_cache(data, because):
    answer = judge_source(data, HERE)
    assert (answer.verdict, answer.because, answer.entries) == ("refused", because, 0)
    assert answer.findings
    with pytest.raises(CacheRefused):
        read_cache(data)


@pytest.mark.parametrize(
    ("data", "because"),
    [
        (file_of(_metadata=None), finding.NO_METADATA),
        (file_of(_metadata="x"), finding.BAD_METADATA + "; " + "; ".join(HERE)),
        (json.dumps({"_metadata": HERE}).encode(), finding.NO_ENTRIES),
        (file_of(k="x"), finding.BAD_ENTRY),
        (file_of(k=["R"]), finding.BAD_ENTRY),
        (file_of(k=["R", 1, [], {}, 5]), finding.BAD_ENTRY),
        (file_of(k=[7, 1]), finding.BAD_ENTRY),
        (file_of(k=["", 1]), finding.BAD_ENTRY),
        (file_of(k=["R", None]), finding.BAD_ENTRY),
        (file_of(k=["R", {}]), finding.BAD_ENTRY),
        (file_of(k=["R", 1, None]), finding.BAD_ENTRY),  # FlashInfer 0.7 fails on it while loading
        (file_of(k=["R", 1, [], 4]), finding.BAD_ENTRY),
        (file_of(k={"runner": "R"}), finding.BAD_ENTRY),
        (file_of(_records=[]), finding.BAD_RECORDS),
        (file_of()[:-1] + b', "x": ["R", 1], "x": ["R", 2]}', strictjson.DUPLICATE),
        (file_of()[:-1] + b', "x": ["R", NaN, []]}', strictjson.NOT_A_NUMBER + "; " + finding.BAD_ENTRY),
        (file_of()[:-1] + b', "x": ["R", 1, [], {"time_ms": 1e999}]}', strictjson.NOT_A_NUMBER),
        (file_of(**{KEY: ["CudnnFp8GemmRunner", 3]}), f"{finding.DROPPED}; {finding.NO_ENTRIES}"),
    ],
)
def test_each_kind_of_damage_is_named(data, because):
    answer = judge_source(data, HERE)
    assert (answer.verdict, answer.because) == ("refused", because)
    with pytest.raises(CacheUnsound) as caught:
        read_cache(data)
    assert caught.value.details


def test_every_reason_at_once():
    data = json.dumps(
        {"_metadata": {**HERE, "gpu": "NVIDIA H100", "cudnn_version": "unknown"}, "a": 1, "b": 2}
    ).encode()
    answer = judge_source(data, HERE)
    assert answer.because == "entry; gpu; cudnn_version"
    assert answer.kind == "hard"
    assert len(answer.findings) == 2
    assert [(f.name, f.kind) for f in answer.fields] == [("gpu", "hard"), ("cudnn_version", "soft")]


def test_entries_of_the_newer_version_are_understood():
    selection = {"time_ms": 0.01, "runner_up_ms": 0.012, "margin": 0.2, "candidates": 9}
    data = file_of(_records={"ns": {}}, _generation="ab", k=["R", [1, [2]], ["l2_cache_policy", "cold"], selection])
    file = read_cache(data)
    entry = file.entries["k"]
    assert (entry.runner, entry.tactic, entry.policy, entry.time_ms) == (
        "R",
        [1, [2]],
        ("l2_cache_policy", "cold"),
        0.01,
    )
    assert file.entries[KEY].policy is None and file.entries[KEY].time_ms is None
    assert file.extras == {"_records": {"ns": {}}, "_generation": "ab"}
    assert file.usable == 2


def test_entries_that_flashinfer_drops_do_not_count():
    answer = judge_source(file_of(a=["CudnnBf16GemmRunner", 3], b=["CudnnBf16GemmRunner", [0, []]]), HERE)
    assert (answer.because, answer.entries) == (finding.DROPPED, 2)


def test_without_an_environment_only_the_file_is_judged():
    answer = judge_source(CASES / "other_gpu_same_arch.json", None)
    assert (answer.verdict, answer.compared) == ("ok", False)


def test_findings_of_one_cause_are_kept_to_a_thousand_and_counted():
    data = '{"_metadata": {}, "n": [' + "NaN," * 1500 + '0], "t": 0,' + '"t": 0,' * 2000 + '"x": 0}'
    found = inspect_cache((data[:-1] + "".join(f', "b{i}": 0' for i in range(3000)) + "}").encode()).findings
    for because, count in ((strictjson.NOT_A_NUMBER, 500), (strictjson.DUPLICATE, 1000), (finding.BAD_ENTRY, 2003)):
        mine = [f.what for f in found if f.because == because]
        assert len(mine) == 1001 and mine[-1] == f"and {count:,} more of this kind"


MANY = '{"_metadata": {}, "k": ['


@pytest.mark.parametrize(
    ("begin", "text", "end"),
    [
        *((MANY, text, "0]}") for text in ("[],", "{},", "1234567,", '"",', "0.5,", "NaN,")),
        ('{"_metadata": {}, "k": 0,', '"k": 0,', '"k": 0}'),
    ],
)
def test_memory_stays_bounded_for_a_file_at_the_limit(tmp_path, begin, text, end):
    path = tmp_path / "cache.json"
    count = min(strictjson.LIMIT // len(text), 1_900_000) - 10
    path.write_text(begin + text * count + end)
    # Not getrusage: a process begins with the largest size of the one that started it.
    code = (
        "import sys, re; from pathlib import Path; from pipeline.cache.judge import judge_source\n"
        "answer = judge_source(Path(sys.argv[1]), {})\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]\n"
        "print(answer.because.replace(' ', '-'), peak)"
    )

    out = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    because, size = out.stdout.split()
    assert because.endswith("entry")
    assert int(size) < 400 * 1024


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert judge_source(path, HERE).because == strictjson.NOT_A_FILE
    with pytest.raises(strictjson.FileMissing):
        judge_source(tmp_path / "none", HERE)
    with pytest.raises(strictjson.FileMissing):
        judge_source(Path("a\0b"), HERE)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_names = st.sampled_from(["_metadata", "_records", "_generation", KEY, "x"]) | st.text(max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_names, _json, max_size=6), st.dictionaries(st.sampled_from(list(HERE)), st.text(), max_size=6))
def test_any_json_is_answered(value, environment):
    answer = judge_source(json.dumps(value).encode(), environment)
    json.dumps(answer.to_json(), allow_nan=False).encode("ascii")
    assert (answer.verdict == "refused") == bool(answer.because)
    for found in answer.findings:
        str(found).encode("utf-8")
        assert "\n" not in str(found) and "\033" not in str(found)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_to_a_real_file_is_answered(data):
    real = (CASES / "h200_real.json").read_bytes()
    at = data.draw(st.integers(0, len(real) - 1))
    judge_source(real[:at] + data.draw(st.binary(max_size=4)) + real[at + data.draw(st.integers(0, 9)) :], HERE)


def test_real_keys_are_taken_apart():
    for key, (runner, _) in ((k, v) for k, v in REAL.items() if k != "_metadata"):
        parts = parse_key(key)
        assert parts is not None
        assert (parts.op, parts.runner) == op_and_runner(key) == ("bf16_gemm", runner)
        assert parts.bucket == parts.shapes[0][0]
    assert parse_key("('o', 'R', ((1, 8, 4096), (-1,), ()), (torch.bfloat16, None, True, 'a\\'b', 1.5))") == EntryKey(
        "o", "R", ((1, 8, 4096), (-1,), ()), ("torch.bfloat16", None, True, "a'b", "1.5")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "(",
        "((",
        "('a', 'b', (), ())x",
        "('a', 'b', (), ()",
        "('a' 'b', (), ())",
        "('a', 'b', (], ())",
        "(" * 9999,
    ],
)
def test_what_is_no_key_is_none(text):
    assert parse_key(text) is None
    assert isinstance(op_and_runner(text), tuple)


@settings(max_examples=120, deadline=None)
@given(st.text() | st.lists(st.sampled_from(list("()[],'\"\\ 19.-a\n")), max_size=40).map("".join))
def test_any_string_may_be_a_key(text):
    parse_key(text)
    op_and_runner(text)


_extra = st.integers() | st.text()
_shape = st.lists(st.integers(-1, 1 << 20), max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(
    st.text(),
    st.text(),
    st.lists(_shape, max_size=5).map(tuple),
    st.lists(st.integers() | st.text(), max_size=3).map(tuple),
)
def test_keys_survive_the_round_trip_where_python_spells_them_plainly(op, runner, shapes, extras):
    parts = parse_key(str((op, runner, shapes, extras)))
    assert parts is not None
    if all("\\" not in repr(t) for t in (op, runner, *extras)) and all(
        abs(e) < 1 << 59 for e in extras if type(e) is int
    ):
        assert parts == EntryKey(op, runner, shapes, extras)
