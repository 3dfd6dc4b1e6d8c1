"""The reader of Dockerfile ARGs, against right answers; tests/docker/test_versions_outline.py asks BuildKit itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.versions.dockerfile import read

CASES = Path(__file__).resolve().parents[1] / "cases" / "dockerfile_args"
EXPECTED: dict[str, dict[str, str]] = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))


def values(text: str) -> dict[str, str | None]:
    return {(f"{a.stage}." if a.stage is not None else "") + a.name: a.value for a in read(text).args}


def one(default: str, before: str = "ARG A=1.2.3\nARG E=\n") -> str | None:
    return values(f"{before}ARG V={default}\nFROM scratch\n")["V"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_case(name: str) -> None:
    text = (CASES / f"{name}.Dockerfile").read_bytes().decode("utf-8")
    read_here = read(text)
    got = {
        key: value
        for arg in read_here.args
        if (value := arg.value) is not None
        for key in [(f"{arg.stage}." if arg.stage is not None else "") + arg.name]
    }
    unscoped = {key.rpartition(".")[2]: value for key, value in got.items()}
    assert EXPECTED[name] in (got, unscoped)
    assert read_here.problems == []


@pytest.mark.parametrize(
    ("default", "value"),
    [
        ("a$A", "a1.2.3"),
        ("$$x", "x"),
        ("${NONE:-${A}}", "1.2.3"),
        ("${E:+p}", ""),
        ("${A%%.*}", "1"),
        ("${A#*.}", "2.3"),
        ("${A//./-}", "1-2-3"),
        ("a'b'\"c\"d", "abcd"),
        ("\\$A", "$A"),
        ("a\\ b", "a b"),
        ("é$A", "é1.2.3"),
    ],
)
def test_expansion(default: str, value: str) -> None:
    assert one(default) == value


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ('"open', "double-quote"),
        ("${}", "bad substitution"),
        ("${A:=x}", "unsupported modifier"),
        ("${NONE:?nope}", "NONE: nope"),
    ],
)
def test_what_buildkit_refuses_has_its_line(word: str, why: str) -> None:
    found = read(f"ARG A=1\nFROM scratch AS s\nARG OK=1\nARG V={word}\nARG LATER=2\n")
    assert [problem.line for problem in found.problems] == [4]
    assert why in found.problems[0].message
    assert {arg.name: arg.value for arg in found.args} == {"A": "1", "OK": "1", "V": None, "LATER": "2"}


def test_lines_are_those_of_the_names() -> None:
    text = "\n".join(
        [
            "# syntax=docker/dockerfile:1",
            "",
            "ARG A=1 \\",
            "  # comment",
            "",
            "  B=2 C=3",
            "FROM scratch AS s",
            "RUN <<ONE cat <<-TWO",
            "ARG NO=1",
            "ONE",
            "ARG NO=2",
            "\tTWO",
            "ARG D=4",
            "RUN a && \\",
            "    b",
            "ARG \\",
            "  E=5",
        ]
    )
    found = {arg.name: arg.line for arg in read(text).args}
    assert found == {"A": 3, "B": 6, "C": 6, "D": 13, "E": 17}
    assert {arg.name: arg.line for arg in read(text.replace("\n", "\r\n")).args} == found
    assert {arg.name: arg.line for arg in read("\ufeff" + text).args} == found


def test_many_lines_of_one_instruction_are_read_in_no_time() -> None:
    began = time.process_time()
    read("FROM x\n" + "ARG A\\\n" * 4000)
    assert time.process_time() - began < 10  # each word looked for on each line: 30 s


def test_stage_is_its_name_its_index_or_none() -> None:
    found = read("ARG A=1\nFROM scratch\nARG B=1\nFROM scratch AS Named\nARG C=1\nFROM scratch\nARG D=1\n").args
    assert [arg.stage for arg in found] == [None, 0, "named", 2]


def test_scopes_follow_the_newest_frontend() -> None:
    assert values("FROM scratch AS s\nARG A=1 B=$A\n") == {"s.A": "1", "s.B": "1"}
    assert values("ARG A\nARG B=${A-unset}\nFROM scratch\n")["B"] == "unset"
    assert values("FROM scratch AS s\nRUN cat << EOF\nARG A=1\nEOF\nARG B=2\n") == {"s.B": "2"}


def test_platform_arguments_are_the_builders() -> None:
    text = "ARG I=x-${TARGETARCH}\nFROM scratch AS s\nARG TARGETARCH\nARG J=${TARGETARCH}\n"
    assert values(text) == {"I": "x-amd64", "s.TARGETARCH": None, "s.J": "amd64"}


def test_bases_are_expanded_and_know_their_parents() -> None:
    found = read("ARG B=a\nARG V=13.0.3\nFROM nvidia/cuda:${V}-base AS a\nFROM ${B} AS b\nFROM A\n").stages
    assert [(s.base, s.parent, s.line) for s in found] == [
        ("nvidia/cuda:13.0.3-base", None, 3),
        ("a", 0, 4),
        ("A", None, 5),
    ]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "no instruction"),
        ("# only a comment\n", 1, "no instruction"),
        ("ARG A=1\n", 1, "no FROM"),
        ("RUN x\nFROM scratch\n", 1, "before the first FROM"),
        ("FROM scratch\nSET x\n", 2, "unknown instruction"),
        ("FROM scratch\nARG\n", 2, "without a name"),
        ("FROM scratch\nARG =1\n", 2, "without a name"),
        ("FROM a b\n", 1, "FROM needs"),
        ("FROM scratch AS 1x\n", 1, "cannot name a stage"),
        ("FROM $NONE\n", 1, "names nothing"),
        ("FROM scratch\nRUN <<EOF\nx\n", 2, "unterminated heredoc"),
        ("FROM scratch\nRUN [1]\n", 2, "Only strings"),
        ("FROM scratch\nENV A\n", 2, "two arguments"),
        ("# escape=x\nFROM scratch\n", 1, "invalid escape token"),
        ("# escape=`\n# escape=`\nFROM scratch\n", 2, "only one escape"),
        (f"FROM scratch\nARG A={'x' * 70000}\n", 2, "longer than"),
    ],
)
def test_a_file_that_buildkit_refuses(text: str, line: int, why: str) -> None:
    problems = read(text).problems
    assert any(problem.line == line and why in problem.message for problem in problems), problems


REFUSED = [
    ("COPY --from=$I /a /b", "not expanded in --from"),
    ("COPY --from ${I} /a /b", "flag without a value"),
    ("RUN --mount=type=bind,from=$I,target=/j true", "not expanded in from="),
    ("COPY --frm=one /a /b", "unknown flag --frm"),
    ("FROM node:-alpine", "node:-alpine is no reference"),
    ("FROM ${I}:", "is no reference"),
    ("HEALTHCHECK --every=1s CMD true", "unknown flag --every"),
]


@pytest.mark.parametrize(("line", "why"), REFUSED)
def test_flags_and_references_that_buildkit_refuses(line: str, why: str) -> None:
    (problem,) = read(f"ARG I=alpine\nFROM scratch AS one\nARG LOCAL=1\n{line}\n").problems
    assert problem.line == 4 and why in problem.message


def test_flags_that_are_fine() -> None:
    lines = [
        "COPY --link --from=one --chown=1:2 --chmod=644 --exclude=*.x a b",
        "ADD --keep-git-dir=true --checksum=sha256:00 https://example.invalid/x /x",
        "RUN --network=none --mount=type=cache,target=/x --device=nvidia.com/gpu=all true",
        "HEALTHCHECK --interval=1s --start-interval=1s CMD true",
        "FROM --platform=$BUILDPLATFORM example.invalid:5000/a/b_c:1.0-x@sha256:" + "0" * 64,
    ]
    assert read("\n".join(["FROM scratch AS one", *lines, ""])).problems == []


def test_a_base_that_a_build_argument_must_name_is_no_problem() -> None:
    assert read("ARG BASE\nFROM ${BASE}\n").problems == []


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet="ARGFOM abc=${}:-+?#%/\\'\"\n\t<`", max_size=200))
def test_no_near_dockerfile_makes_it_raise(text: str) -> None:
    found = read(text)
    count = text.count("\n") + 1
    assert all(1 <= arg.line <= count for arg in found.args)
    assert all(1 <= problem.line <= count for problem in found.problems)
