"""The reader of requirements files, and the verdict of `check` on every pin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from versions_trees import FLASHINFER, plant, source, texts

from pipeline.versions.check import check
from pipeline.versions.requirements import Pin, logical_lines, parse, read

CASES = Path(__file__).resolve().parents[1] / "cases" / "requirements"
EXPECTED = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_case(tmp_path: Path, name: str) -> None:
    answer = EXPECTED[name]
    root = plant(
        tmp_path,
        {
            "versions.json": source({answer["variable"]: answer["version"]}, {answer["variable"]: FLASHINFER}),
            "requirements/case.txt": (CASES / f"{name}.txt").read_bytes(),
        },
    )
    found = [one for one in check(root).findings if "is unused" not in one.message]
    assert ("drift" if found else "ok") == answer["verdict"], texts(found)
    assert all(finding.path == "requirements/case.txt" and finding.line for finding in found)


def pins(tmp_path: Path, files: dict[str, str | bytes], first: str = "requirements.txt") -> list[tuple[object, ...]]:
    found = read(plant(tmp_path, files), first)
    return [(pin.path, pin.line, pin.name, pin.specifier, pin.marker) for pin in found.pins]


def test_lines_are_those_at_which_a_requirement_begins(tmp_path: Path) -> None:
    text = "# first\n\na==1\nb \\\n  ==2 \\\n  --hash=sha256:00\n\nc==3 ; python_version>'3' # why\n-e ./here\n"
    assert pins(tmp_path, {"requirements.txt": text}) == [
        ("requirements.txt", 3, "a", "==1", None),
        ("requirements.txt", 4, "b", "==2", None),
        ("requirements.txt", 8, "c", "==3", 'python_version > "3"'),
        ("requirements.txt", 9, None, "", None),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding in ("utf-16-be", "utf-16-le") else ""
    data = (mark + "# é\r\na==1\r\n").encode(encoding)
    assert [row[2:4] for row in pins(tmp_path, {"requirements.txt": data})] == [("a", "==1")]


def test_includes_are_followed_once(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "requirements/a.txt": "-r b.txt\n-c ../limits.txt\n--requirement=b.txt\na==1\n",
        "requirements/b.txt": "-rc.txt\nb==2\n",
        "requirements/c.txt": "c==3\n",
        "limits.txt": "d==4\n",
    }
    found = read(plant(tmp_path, files), "requirements/a.txt")
    assert sorted((pin.name, pin.path) for pin in found.pins) == [
        ("a", "requirements/a.txt"),
        ("b", "requirements/b.txt"),
        ("c", "requirements/c.txt"),
        ("d", "limits.txt"),
    ]


def test_a_file_that_includes_itself(tmp_path: Path) -> None:
    files = {"a.txt": "x==1\n-r b.txt\n", "b.txt": "-r a.txt\ny==2\n"}
    found = read(plant(tmp_path, files), "a.txt")
    assert [pin.name for pin in found.pins] == ["x", "y"]
    assert texts(found.problems) == ["b.txt:1: includes itself: a.txt -> b.txt -> a.txt"]


def test_includes_have_a_depth(tmp_path: Path) -> None:
    files = {f"{number}.txt": f"-r {number + 1}.txt\n" for number in range(1500)}
    assert texts(read(plant(tmp_path, files), "0.txt").problems) == [
        "50.txt:1: includes 51.txt, more than 50 files deep"
    ]


def test_a_link_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("a.txt")
    (problem,) = texts(read(tmp_path, "a.txt").problems)
    assert problem.startswith("a.txt: cannot be read: ")


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    files = {"a.txt": "-r gone.txt\n-r ../outside.txt\n-r https://example.invalid/x.txt\nx==1\n"}
    found = read(plant(tmp_path, files), "a.txt")
    assert texts(found.notes) == [
        "a.txt:1: includes gone.txt, which is not there",
        "a.txt:3: includes https://example.invalid/x.txt, an address, which was not read",
    ]
    assert texts(found.problems) == ["a.txt:2: includes ../outside.txt, which lies outside the tree"]


def test_bad_lines_are_all_found(tmp_path: Path) -> None:
    found = read(plant(tmp_path, {"a.txt": "a==1\n???\nb=1\nc==2\n"}), "a.txt")
    assert [pin.name for pin in found.pins] == ["a", "c"]
    assert [(problem.line, problem.message[:20]) for problem in found.problems] == [
        (2, "'???' is not a requi"),
        (3, "'b=1' is not a requi"),
    ]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    found = read(plant(tmp_path, {"a.txt": b"a==1\nb==2 # \xff\n"}), "a.txt")
    assert found.pins == []
    assert texts(found.problems) == ["a.txt: is text neither in UTF-8 nor in UTF-16"]


@pytest.mark.parametrize(
    ("text", "name", "specifier", "url"),
    [
        ("Foo_Bar[x,y]>=1,<2", "foo-bar", "<2,>=1", ""),
        ("foo @ https://example.invalid/foo-1.0.tar.gz", "foo", "", "https://example.invalid/foo-1.0.tar.gz"),
        ("./foo-1.0-py3-none-any.whl", "foo", "==1.0", "./foo-1.0-py3-none-any.whl"),
        ("./foo", None, "", "./foo"),
        ("file:.#egg=demo", "demo", "", "file:.#egg=demo"),
        (
            "foo @ https://example.invalid/foo-1.0%2Bcu1-py3-none-any.whl",
            "foo",
            "==1.0+cu1",
            "https://example.invalid/foo-1.0%2Bcu1-py3-none-any.whl",
        ),
        (
            "git+https://example.invalid/o/foo@v1#egg=Foo_X",
            "foo-x",
            "",
            "git+https://example.invalid/o/foo@v1#egg=Foo_X",
        ),
    ],
)
def test_kinds_of_requirements(text: str, name: str | None, specifier: str, url: str) -> None:
    pin = parse(text)
    assert isinstance(pin, Pin)
    assert (pin.name, pin.specifier, pin.url) == (name, specifier, url)


def test_an_address_keeps_its_marker() -> None:
    pin = parse('https://example.invalid/v1/demo_lib-1.0+cu124-py3-none-win_amd64.whl; platform_system == "Windows"')
    assert isinstance(pin, Pin)
    assert (pin.name, pin.specifier, pin.marker) == ("demo-lib", "==1.0+cu124", 'platform_system == "Windows"')
    assert not isinstance(parse("https://example.invalid/a.whl; nonsense"), Pin)


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_no_text_makes_it_raise(text: str) -> None:
    for line, content in logical_lines(text):
        assert line >= 1
        parse(content)
