"""Git refs in commands: which repository each belongs to, whatever the directory is called; and any text at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from versions_trees import CUDA, FLASHINFER, plant, source

from pipeline.versions.check import check
from pipeline.versions.gitrefs import Shell, refs
from pipeline.versions.source import read
from pipeline.versions.texts import Texts

U = "https://example.invalid/o"
RELATIONS = {"FLASHINFER_VERSION": FLASHINFER, "CUDA_VERSION": CUDA}
VERSIONS = read(source({"FLASHINFER_VERSION": "0.6.16", "CUDA_VERSION": "13.0.3"}, RELATIONS).encode())


def found(root: Path, path: str, text: str) -> list[tuple[int, str]]:
    """Line and ref of every finding about a git ref."""
    plant(root, {"versions.json": VERSIONS.text, path: text})
    return [(one.line, one.message.partition(",")[0]) for one in check(root).findings if one.rule == "git"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"RUN git clone {U}/flashinfer /src/fi", "RUN cd /src/fi && git checkout v0.6.1"], [3]),
        ([f"RUN git clone {U}/flashinfer fi", "RUN cd fi && git checkout v0.6.1"], [3]),
        ([f"RUN git clone {U}/flashinfer /src/fi", "WORKDIR /src", "WORKDIR fi", "RUN git switch -d v0.6.1"], [5]),
        (["ENV D=/src/fi", f"RUN git clone {U}/flashinfer $D", "WORKDIR $D", "RUN git reset --hard v0.6.1"], [5]),
        (["ENV D=/fi", f"RUN git clone {U}/b $D", "ENV D=$X", "WORKDIR $D", "RUN git reset --hard v0.6.1"], []),
        ([f"RUN git clone {U}/flashinfer && cd flashinfer && git checkout refs/tags/v0.6.16"], []),
        ([f"RUN git clone -b refs/tags/v0.6.16 {U}/flashinfer", f"ADD {U}/flashinfer.git#refs/tags/v0.6.16 /x"], []),
        ([f"RUN git clone --revision=refs/tags/v0.6.1 {U}/flashinfer"], [2]),
        ([f"RUN git clone {U}/flashinfer && cd flashinfer && git checkout tags/v0.6.1 -b local"], [2]),
        ([f"RUN git clone {U}/flashinfer && cd flashinfer && git checkout v0.6.16 -b v0.6.1-local"], []),
        (["RUN git clone -b v0.6.1 ${MIRROR}/o/flashinfer.git /src", "RUN git clone -b v0.6.1 $M/o/other"], [2]),
        (["RUN git clone -b v0.6.1 ${MIRROR:-https://e.invalid}/o/flashinfer.git"], [2]),
        (["ENV REF=v0.6.1", f"RUN git clone -b $REF {U}/flashinfer"], [3]),
        ([f"RUN REF=v0.6.1; git clone -b $REF {U}/flashinfer", f"RUN git clone -b $REF {U}/flashinfer"], [2]),
        (["RUN <<EOF", "REF='v0.6.1'", f'git clone -b "${{REF}}" {U}/flashinfer', "EOF"], [4]),
        ([f"RUN REF=v0.6.1; REF=v0.6.16; git clone -b $REF {U}/flashinfer"], []),
        ([f"RUN REF=v0.6.1; REF=$(latest); git clone -b $REF {U}/flashinfer"], []),
        (["ARG D=/src/fi", f"RUN git clone {U}/flashinfer $D", "WORKDIR $D", "RUN git reset --hard v0.6.1"], [5]),
        ([f"RUN git clone {U}/flashinfer /fi", "RUN git -C /fi/csrc checkout v0.6.1"], [3]),
        ([f"RUN git clone {U}/flashinfer && cd flashinfer/csrc && git checkout v0.6.1"], [2]),
        ([f"RUN git clone {U}/flashinfer && cd flashinfer/3rdparty/cutlass && git checkout v3.5.1"], []),
        ([f"RUN git clone {U}/flashinfer /a", f"RUN git clone {U}/b /b", "RUN cd /b && git checkout v0.6.1"], []),
        ([f"RUN git clone {U}/flashinfer /a/x", "RUN cd /b/x && git checkout v0.6.1"], []),
        ([f"RUN git clone {U}/flashinfer /a/x", "RUN cd x && git checkout v0.6.1"], [3]),
        ([f"RUN git clone {U}/flashinfer /x", "FROM scratch", "RUN cd /x && git checkout v0.6.1"], []),
        ([f"RUN git clone {U}/flashinfer /x", "FROM s", "RUN cd /x && git checkout v0.6.1"], [4]),
        ([f"RUN git clone {U}/flashinfer x && (cd y && make) && cd x && git checkout v0.6.1"], [2]),
        ([f"RUN git clone {U}/flashinfer x; pushd y; make; popd; cd x; git checkout v0.6.1"], [2]),
        ([f"RUN git clone {U}/flashinfer x; cd y; make; cd -; cd x; git checkout v0.6.1"], [2]),
        ([f"RUN git clone {U}/flashinfer x", "RUN <<EOF", "cd x", "git checkout tags/v0.6.1", "EOF"], [5]),
        ([f"RUN cd x && git init && git remote add origin {U}/flashinfer", "RUN cd x && git fetch origin v0.6.1"], [3]),
        ([f"RUN git fetch --depth 1 {U}/flashinfer tag v0.6.1"], [2]),
        ([f"RUN git fetch {U}/flashinfer +refs/tags/v0.6.1:refs/x && git checkout FETCH_HEAD"], [2]),
        ([f"RUN git clone {U}/flashinfer x && git --work-tree=x --git-dir=x/.git checkout v0.6.1"], [2]),
    ],
)
def test_a_checkout_is_known_by_where_it_lies(tmp_path: Path, lines: list[str], expected: list[int]) -> None:
    text = "\n".join(["FROM scratch AS s", *lines]) + "\n"
    assert found(tmp_path, "Dockerfile", text) == [(line, "flashinfer at v0.6.1") for line in expected]


PIECES = [
    "git ", "clone ", "checkout ", "switch ", "reset ", "fetch ", "remote add ", "-C ", "-C x ", "-b ", "--branch=", "cd ", "cd ..", "pushd ", "popd",
    "(", ")", ";", "&&", "|", "\n", "\v", "$X", "'", '"', "#", " ", "\\", "a/", "../", "v0.6.1", "-", "origin ", "--", "3rdparty/", "@",
    f"{U}/flashinfer ", f"{U}/flashinfer.git@v1.0 ", "git@h:o/flashinfer ", "flashinfer ", "flashinfer/", "tags/", "?tag=", "=", ":",
]  # fmt: skip


@settings(deadline=None)
@given(
    st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)),
    st.sampled_from(["", "/", "/a/b"]),
)
def test_any_text_is_read_and_every_match_lies_in_it(text: str, directory: str) -> None:
    shell = Shell(directory)
    for match, repository, ref in refs(text, Texts(VERSIONS).repository, ("flashinfer",), shell):
        assert text[match.start() : match.end()] == match[0]
        assert (repository, bool(ref) or ref == "") == ("flashinfer", True)
    assert set(shell.cloned.values()) <= {"flashinfer", "cuda", ""}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join))
def test_time_grows_with_the_text(piece: str) -> None:
    looker = Texts(VERSIONS)
    began = time.process_time()
    for _ in looker.look(piece * (50_000 // len(piece))):
        pass
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "piece",
    [
        "git -C ",
        "git --a ",
        "-b ",
        f"{U}/x -b v1 ",
        "flashinfer/",
        "cd a/;",
        "cd a;git checkout v1;",
        "(cd a;",
        "(",
        ")",
        "git clone ",
        "--branch   ",
    ],
)
@pytest.mark.parametrize("before", ["", "git ", f"git clone {U}/flashinfer "])
def test_time_grows_with_a_row_of_one_piece(before: str, piece: str) -> None:
    began = time.process_time()
    for _ in Texts(VERSIONS).look(before + piece * (100_000 // len(piece))):
        pass
    assert time.process_time() - began < 5  # quadratic, it takes longer
