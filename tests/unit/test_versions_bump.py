"""Moving versions, with an index that lives in the test; packages' own requirements; where a version reaches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from versions_trees import FLASHINFER, plant, source, texts

from pipeline.__main__ import main
from pipeline.contract.files import write_whole
from pipeline.versions import drift, index, load
from pipeline.versions.bump import BumpRefused, Wishes, write
from pipeline.versions.bump import bump as work_out
from pipeline.versions.recorded import RECORD, Recorded, dump_record
from pipeline.versions.sites import same_version
from pipeline.versions.sync import sync

ROOT = Path(__file__).resolve().parents[2]

# package -> version -> (Requires-Python, Requires-Dist)
INDEX: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "flashinfer-python": {
        "0.6.16.post3": (">=3.10", ("ffi<0.2,>=0.1", "cuda-tool>=1", 'old; python_version < "3.9"')),
        "0.7.2.post1": (">=3.10", ("ffi<0.4,>=0.2", "cuda-tool>=1")),
        "0.7.4": (">=3.10", ("ffi<0.4,>=0.2", "cuda-tool>=1")),
        "0.8.0": (">=3.12", ("ffi<0.4,>=0.2",)),
        "0.9.0": (">=3.10", ("ffi<0.4,>=0.2", "new-thing")),
        "0.9.1": (">=3.10", ("ffi<0.4,>=0.2", "thing[fast]<2,>=1")),
        "1.0.0rc1": (">=3.10", ("ffi<0.4,>=0.2",)),
    },
    "thing": {"1.0": ("", ()), "1.5": ("", ("lone", 'its-own>1; extra == "fast"')), "2.0": ("", ())},
    "its-own": {"1.0": ("", ()), "3.0": ("", ())},
    "ffi": {"0.1.5": ("", ()), "0.2.0": ("", ()), "0.3.1": ("", ()), "0.4.0": ("", ())},
    "lone": {"1.0": ("", ())},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the index; collects what was asked."""
    said: list[str] = []

    def available(package: str, python: str, *, pre: bool = False) -> list[str]:
        said.append(f"{package} for {python}")
        if package not in INDEX:
            raise index.IndexLacks(f"the index that pip is configured for has no {package}")
        return [version for version in reversed(INDEX[package]) if pre or "rc" not in version]

    def describe(pins: Iterable[tuple[str, tuple[str, ...], str]], python: str) -> dict[str, Recorded]:
        found = {}
        for name, extras, version in pins:
            said.append(f"{name} {version}")
            if version not in INDEX.get(name, {}):
                raise index.IndexLacks(f"No matching distribution found for {name}=={version}")
            found[name] = Recorded(version, extras, *INDEX[name][version])
        return found

    monkeypatch.setattr(index, "available", available)
    monkeypatch.setattr(index, "describe", describe)
    return said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    values = {
        "FLASHINFER_VERSION": "0.6.16.post3",
        "FFI_VERSION": "0.1.5",
        "PYTHON_VERSION": "3.11",
        "LONE_VERSION": "1.0",
    }
    text = source(values, {"FLASHINFER_VERSION": FLASHINFER}, {"requirements/image.txt": ["cuda-tool"]})
    files: dict[str, str | bytes] = {
        "versions.json": text.replace('"variable": {', '"variable": {\n'),  # a layout of its own
        "templates/Dockerfile.j2": "ARG FLASHINFER_VERSION={{ FLASHINFER_VERSION }}\nARG PYTHON_VERSION={{ PYTHON_VERSION }}\n"
        "FROM scratch\n",
        "templates/requirements/image.txt.j2": "flashinfer-python=={{ FLASHINFER_VERSION }}\nffi=={{ FFI_VERSION }}\n"
        "lone=={{ LONE_VERSION }}\n",
        RECORD: dump_record(
            {
                "flashinfer-python": Recorded("0.6.16.post3", (), *INDEX["flashinfer-python"]["0.6.16.post3"]),
                "ffi": Recorded("0.1.5", (), "", ()),
                "lone": Recorded("1.0", (), "", ()),
            }
        ),
    }
    plant(tmp_path, files)
    sync(tmp_path, load(tmp_path))
    assert drift(tmp_path) == []
    return tmp_path


def bump(root: Path, *words: str) -> int:
    return main(["versions", "bump", *words, "--root", str(root)])


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def refused(root: Path, words: Sequence[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    before = contents(root)
    assert bump(root, *words) == status
    assert contents(root) == before
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_a_bump_moves_what_is_tied_to_it(root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = (root / "versions.json").read_text()
    assert bump(root, "FLASHINFER_VERSION=0.7.4") == 0
    captured = capsys.readouterr()
    moved = load(root)
    assert (moved["FLASHINFER_VERSION"], moved["FFI_VERSION"]) == ("0.7.4", "0.3.1")
    assert moved.text == before.replace('"0.6.16.post3"', '"0.7.4"').replace('"0.1.5"', '"0.3.1"')
    assert "FFI_VERSION 0.1.5 -> 0.3.1 (flashinfer-python 0.7.4 requires ffi<0.4,>=0.2)" in captured.err
    assert captured.out.startswith("--- versions.json (before)\n+++ versions.json (after)\n")
    for line in ("-flashinfer-python==0.6.16.post3", "+flashinfer-python==0.7.4", "+ffi==0.3.1"):
        assert f"\n{line}\n" in captured.out
    assert drift(root) == []
    assert json.loads((root / RECORD).read_text())["packages"]["ffi"]["version"] == "0.3.1"


def test_what_the_new_version_requires_and_nothing_pins_is_added(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (root / "versions.json").read_text()
    template = (root / "templates/requirements/image.txt.j2").read_text()
    assert bump(root, "FLASHINFER_VERSION=0.9.1") == 0
    assert drift(root) == []
    moved = load(root)
    assert (moved["THING_VERSION"], moved["ITS_OWN_VERSION"]) == ("1.5", "3.0")
    added = 'THING_VERSION": {"default": "1.5"}', 'ITS_OWN_VERSION": {"default": "3.0"}'
    assert all(f'"{one}' in moved.text for one in added)
    plain = moved.text
    for one in added:
        plain = re.sub(rf',\s*"{re.escape(one)}', "", plain)
    assert plain == before.replace('"0.6.16.post3"', '"0.9.1"').replace('"0.1.5"', '"0.3.1"')
    assert (root / "templates/requirements/image.txt.j2").read_text() == template + (
        "thing[fast]=={{ THING_VERSION }}  # flashinfer-python requires it\n"
        "its-own=={{ ITS_OWN_VERSION }}  # thing requires it\n"
    )
    said = capsys.readouterr()
    assert "THING_VERSION 1.5 is new (flashinfer-python 0.9.1 requires thing<2,>=1)" in said.err
    assert "ITS_OWN_VERSION 3.0 is new (thing 1.5 requires its-own>1)" in said.err
    assert "\n+its-own==3.0  # thing requires it\n" in said.out
    assert (
        bump(root, "FLASHINFER_VERSION=0.7.4", "--allow-downgrade") == 0
    )  # what was added stays until somebody takes it
    assert drift(root) == []


def test_a_template_is_put_back_where_the_source_cannot_be_written(
    root: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = work_out(root, Wishes({"FLASHINFER_VERSION": "0.9.1"}), asked.append)
    before = contents(root)

    def deny(path: Path, data: bytes, *, mode: int) -> bool:
        if path == root / "versions.json":
            raise PermissionError(13, "Permission denied")
        return write_whole(path, data, mode=mode)

    monkeypatch.setattr("pipeline.versions.outcome.write_whole", deny)
    with pytest.raises(BumpRefused, match="Permission denied"):
        write(root, outcome)
    assert contents(root) == before


def test_dry_run_prints_the_same_and_writes_nothing(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(root)
    assert bump(root, "FLASHINFER_VERSION=0.7.4", "--dry-run") == 0
    dry = capsys.readouterr().out
    assert contents(root) == before
    assert bump(root, "FLASHINFER_VERSION=0.7.4") == 0
    assert capsys.readouterr().out == dry


def test_what_the_command_names_is_not_moved_otherwise(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bump(root, "FLASHINFER_VERSION=0.7.4", "FFI_VERSION=0.2.0") == 0
    assert load(root)["FFI_VERSION"] == "0.2.0"
    capsys.readouterr()
    said = refused(root, ["FFI_VERSION=0.4.0"], capsys, 3)
    assert (
        "requirements/image.txt:2: ffi==0.4.0, flashinfer-python 0.7.4 requires ffi<0.4,>=0.2 (move FFI_VERSION)"
        in said
    )
    assert "nothing was written" in said


def test_latest_is_the_newest_release(root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bump(root, "--latest", "FFI_VERSION", "--dry-run") == 3  # 0.4.0 is more than flashinfer takes
    said = capsys.readouterr().err
    assert "ffi==0.4.0, flashinfer-python 0.6.16.post3 requires" in said
    assert bump(root, "--latest", "LONE_VERSION") == 0
    assert "nothing changes" in capsys.readouterr().err
    assert bump(root, "--latest", "FLASHINFER_VERSION", "--dry-run") == 0
    assert "FLASHINFER_VERSION 0.6.16.post3 -> 0.9.1\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["FLASHINFER_VERSION=0.7.3"], 2, "hint: nearest is FLASHINFER_VERSION=0.7.2.post1"),
        (["FLASHINFER_VERSION=0.6.10"], 2, "would go down from 0.6.16.post3 to 0.6.10"),
        (["FLASHINFER_VERSION=0.8.0"], 3, "flashinfer-python 0.8.0 requires Python >=3.12, versions.json says 3.11"),
        (
            ["FLASHINFER_VERSION=0.9.0"],
            3,
            "flashinfer-python 0.9.0 requires new-thing, which requirements/image.txt does not",
        ),
        (["FLASHINFR_VERSION=1"], 2, 'did you mean "FLASHINFER_VERSION"?'),
        (["flashinfer=0.7.4"], 2, 'hint: did you mean "FLASHINFER_VERSION"?'),
        (["flashinfer-cubin=0.7.4"], 2, 'hint: did you mean "FLASHINFER_VERSION"?'),
        (["FLASHINFER_VERSION=v0.7.4"], 2, '"v0.7.4" of "FLASHINFER_VERSION" is a tag: write "0.7.4", for it governs'),
        (["--latest", "PYTHON_VERSION"], 2, "has no python"),
        (["FLASHINFER_VERSION=not-a-version"], 2, "is not a version (PEP 440), and it governs packages"),
        (["FLASHINFER_VERSION=1 2$"], 2, 'the value of "FLASHINFER_VERSION" has a quote'),
        (["FLASHINFER_VERSION"], 2, "is not NAME=VERSION"),
        (["FLASHINFER_VERSION="], 2, "is not NAME=VERSION"),
        (["FFI_VERSION=0.2.0", "FFI_VERSION=0.3.1"], 2, "FFI_VERSION is given twice"),
        (["FFI_VERSION=0.2.0", "--latest", "FFI_VERSION"], 2, "is given a version and `--latest`"),
        ([], 2, "nothing to move"),
        (["--latest", "FFI_VERSION", "--offline"], 2, "`--offline` cannot look up ffi"),
    ],
)
def test_what_is_refused_writes_nothing(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str], words: list[str], status: int, expected: str
) -> None:
    assert expected in refused(root, words, capsys, status)


def test_a_downgrade_that_is_meant(root: Path, asked: list[str]) -> None:
    assert bump(root, "FLASHINFER_VERSION=0.7.4") == 0
    assert bump(root, "FLASHINFER_VERSION=0.6.16.post3", "--allow-downgrade") == 0
    assert load(root)["FFI_VERSION"] == "0.1.5"


def test_a_pre_release_is_found_when_it_is_named(root: Path, asked: list[str]) -> None:
    assert bump(root, "FLASHINFER_VERSION=1.0.0rc1") == 0


def test_offline_asks_nobody_and_leaves_the_record(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    record = (root / RECORD).read_bytes()
    assert bump(root, "FLASHINFER_VERSION=0.7.4", "FFI_VERSION=0.3.1", "--offline") == 0
    assert asked == []
    assert (root / RECORD).read_bytes() == record
    assert (
        f"{RECORD}: has flashinfer-python 0.6.16.post3, 0.7.4 is pinned; `pipeline versions bump --refresh` records it"
        in texts(drift(root))
    )
    assert bump(root, "--refresh") == 0
    assert drift(root) == []


def test_a_tree_that_disagrees_already_is_not_moved(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plant(root, {"docker/other.Dockerfile": "FROM scratch\nARG FLASHINFER_VERSION=0.1\n"})
    assert "docker/other.Dockerfile:2: ARG FLASHINFER_VERSION=0.1" in refused(
        root, ["FFI_VERSION=0.1.5", "--refresh"], capsys, 3
    )


def test_names_that_are_one_version_move_together(tmp_path: Path, asked: list[str]) -> None:
    values = {"LONE_VERSION": "0.9", "TWIN_VERSION": "0.9"}
    plant(
        tmp_path,
        {
            "versions.json": source(values, {"TWIN_VERSION": {"packages": [], "same_as": "LONE_VERSION"}}),
            "templates/Dockerfile.j2": "ARG LONE_VERSION={{ LONE_VERSION }} TWIN_VERSION={{ TWIN_VERSION }}\nFROM x\n",
        },
    )
    sync(tmp_path, load(tmp_path))
    assert bump(tmp_path, "LONE_VERSION=1.0") == 0
    assert dict(load(tmp_path)) == {"LONE_VERSION": "1.0", "TWIN_VERSION": "1.0"}


def test_a_record_that_is_missing_or_broken(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / RECORD).unlink()
    said = f"{RECORD}: is missing, so what ffi, flashinfer-python, lone require is not checked; `pipeline versions bump --refresh` records it"
    assert texts(drift(root)) == [said]
    whole = json.loads((root / "versions.json").read_text())
    plant(root, {"versions.json": json.dumps({**whole, "closures": {}})})
    assert (
        main(["versions", "check", "--root", str(root)]) == 0
    )  # nobody asked for it, but nobody is told that all was checked
    captured = capsys.readouterr()
    assert captured.out == "" and f"note: {said}\n" in captured.err
    plant(root, {RECORD: "{"})
    assert any(text.startswith(f"{RECORD}:1:1: ") for text in texts(drift(root)))
    plant(root, {RECORD: '{"packages": {"ffi": []}}'})
    assert f"{RECORD}: the entry of ffi is not one; `pipeline versions bump --refresh` records it" in texts(drift(root))


def test_a_bump_without_templates_says_what_to_write_by_hand(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    docker = "ARG FFI_VERSION=0.1.5\nFROM scratch\n"
    root = plant(tmp_path, {"versions.json": source({"FFI_VERSION": "0.1.5"}), "Dockerfile": docker})
    said = refused(root, ["FFI_VERSION=0.2.0"], capsys, status=3)
    assert "Dockerfile:1: ARG FFI_VERSION=0.1.5, versions.json says 0.2.0" in said
    assert "hint: there is no templates/ to render these places from: write the new versions there by hand" in said
    plant(root, {"Dockerfile": docker.replace("0.1.5", "0.2.0")})
    assert bump(root, "FFI_VERSION=0.2.0") == 0
    assert drift(root) == [] and load(root)["FFI_VERSION"] == "0.2.0"
    assert "1 file written" in capsys.readouterr().err


def test_a_version_that_only_an_arg_carries_is_looked_up_too(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = source({"FLASHINFER_VERSION": "0.7.4", "CUDA_VERSION": "1.0"}, {"FLASHINFER_VERSION": FLASHINFER})
    template = "ARG FLASHINFER_VERSION={{ FLASHINFER_VERSION }} CUDA_VERSION={{ CUDA_VERSION }}\nFROM scratch\n"
    root = plant(tmp_path, {"versions.json": text, "templates/Dockerfile.j2": template})
    sync(root, load(root))
    assert "nearest is FLASHINFER_VERSION=0.7.4" in refused(root, ["FLASHINFER_VERSION=0.7.5"], capsys)
    assert bump(root, "FLASHINFER_VERSION=0.8.0", "CUDA_VERSION=2.0") == 0  # nothing says that CUDA is a package
    assert not (root / RECORD).exists()
    assert asked == ["flashinfer-python for "] * 2


def test_a_build_of_torch_must_fit_cuda(tmp_path: Path) -> None:
    relations = {"CUDA_VERSION": {"packages": [], "local_label": ["cu{major}{minor}"]}}
    record = {"torch": Recorded("2.13.0+cu129", (), "", ("nvidia-cublas-cu12==1; platform_system == 'Linux'",))}
    plant(
        tmp_path,
        {
            "versions.json": source({"TORCH_VERSION": "2.13.0", "CUDA_VERSION": "13.0.3"}, relations),
            "requirements/a.txt": "torch==2.13.0\n",
            "docker/Dockerfile": "FROM scratch\nARG CUDA_VERSION=13.0.3\n",
            RECORD: dump_record(record),
        },
    )
    assert texts(drift(tmp_path)) == [
        "requirements/a.txt:1: torch 2.13.0+cu129 requires nvidia-cublas-cu12==1: cu12, "
        "versions.json says 13.0.3 (CUDA_VERSION), so cu130",
        "requirements/a.txt:1: torch 2.13.0+cu129: cu129, versions.json says 13.0.3 (CUDA_VERSION), so cu130",
    ]
    plant(tmp_path, {RECORD: dump_record({"torch": Recorded("2.13.0+cu130", (), "", ("nvidia-cublas-cu13==1",))})})
    assert drift(tmp_path) == []


def test_online_names_what_the_index_no_longer_has(
    root: Path, asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["versions", "check", "--online", "--root", str(root)]) == 0
    monkeypatch.setitem(INDEX, "lone", {})
    assert main(["versions", "check", "--online", "--root", str(root)]) == 3
    assert capsys.readouterr().out == "requirements/image.txt:3: the index has no lone 1.0\n"
    monkeypatch.setitem(INDEX, "lone", {"1.0": (">=3.12", ())})
    assert main(["versions", "check", "--online", "--root", str(root)]) == 3
    out = capsys.readouterr().out
    assert "requirements/image.txt:3: lone 1.0 requires Python >=3.12, versions.json says 3.11 (PYTHON_VERSION)" in out
    assert f"{RECORD}: what lone requires is not what was recorded" in out


def test_the_nearest_version() -> None:
    versions = ["1.0", "2.0", "2.1", "2.1.post1", "3.0"]
    assert index.nearest(versions, "2.2") == "2.1.post1"
    assert index.nearest(versions, "2.0.5") == "2.0"
    assert index.nearest(versions, "9") == "3.0"
    assert index.nearest(versions, "0.1") == "1.0"
    assert index.nearest([], "1") == ""
    assert index.nearest(["2.14.0", "2.13.0+cpu", "2.13.0"], "2.13.1") == "2.13.0"
    assert index.nearest(["2.13.0+cpu"], "2.13.1") == "2.13.0"


def test_where_names_every_place(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(root, {"docker/build.sh": "echo $FLASHINFER_VERSION\n# $FLASHINFER_VERSION\n"})
    assert main(["versions", "usages", "FLASHINFER_VERSION", "--root", str(root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "docker/Dockerfile:1: ARG: ARG FLASHINFER_VERSION=0.6.16.post3",
        "docker/build.sh:1: reference: echo $FLASHINFER_VERSION",
        "requirements/image.txt:1: pin: flashinfer-python==0.6.16.post3",
        "templates/Dockerfile.j2:1: template: {{ FLASHINFER_VERSION }}",
        "templates/requirements/image.txt.j2:1: template: {{ FLASHINFER_VERSION }}",
        "versions.json:4: source: FLASHINFER_VERSION=0.6.16.post3",
    ]
    plant(root, {"docker/Dockerfile": "FROM scratch\nARG FLASHINFER_VERSION=1\n"})
    assert main(["versions", "usages", "FLASHINFER_VERSION", "--root", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["wrong"] for row in rows if row["wrong"]] == [
        "ARG FLASHINFER_VERSION=1, versions.json says 0.6.16.post3"
    ]


def test_where_of_a_name_that_is_none(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["versions", "usages", "FLASHINFER_VERSON", "--root", str(root)]) == 2
    assert 'did you mean "FLASHINFER_VERSION"?' in capsys.readouterr().err


def test_our_record_is_of_what_is_pinned() -> None:
    recorded = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))["packages"]
    versions = load(ROOT)
    governed = {package: versions[name] for package, name in versions.governors().items()}
    assert recorded and all(same_version(entry["version"], governed[name]) for name, entry in recorded.items())


def test_bumps_at_the_same_time_all_arrive(root: Path) -> None:
    """Each waits for the one before it: none is lost although all say that they wrote."""
    moves = ["FLASHINFER_VERSION=0.7.4", "FFI_VERSION=0.1.6", "LONE_VERSION=2.0"]
    command = [sys.executable, "-m", "pipeline", "versions", "bump", "--offline", "--root", str(root)]
    started = [subprocess.Popen([*command, move], cwd=ROOT, stdout=subprocess.DEVNULL) for move in moves]
    assert [one.wait(timeout=120) for one in started] == [0, 0, 0]
    assert [f"{name}={load(root)[name]}" for name in ("FLASHINFER_VERSION", "FFI_VERSION", "LONE_VERSION")] == moves
    assert (root / "requirements/image.txt").read_text() == "flashinfer-python==0.7.4\nffi==0.1.6\nlone==2.0\n"


def test_what_was_edited_in_the_meantime_is_not_written_over(root: Path) -> None:
    outcome = work_out(root, Wishes({"LONE_VERSION": "2.0"}, offline=True), lambda _: None)
    path = root / "versions.json"
    path.write_text(path.read_text().replace("0.1.5", "0.2.0"))
    before = contents(root)
    with pytest.raises(BumpRefused, match="changed in the meantime"):
        write(root, outcome)
    assert contents(root) == before


def test_a_reader_that_goes_away_leaves_nothing_unwritten(root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "versions",
        "bump",
        "LONE_VERSION=2.0",
        "--offline",
        "--root",
        str(root),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert load(root)["LONE_VERSION"] == "2.0"


@pytest.mark.parametrize(
    ("refused", "hint"),
    [
        ("versions.json", "make it writable, then repeat the command; nothing was written"),
        ("docker/Dockerfile", "versions.json is written: make this writable, then run `pipeline versions sync`"),
    ],
)
def test_a_file_that_cannot_be_written_has_the_hint_that_helps(
    root: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, refused: str, hint: str
) -> None:
    outcome = work_out(root, Wishes({"FLASHINFER_VERSION": "0.7.4"}), asked.append)
    if refused not in outcome.files:
        outcome.files[refused] = b"x"

    def deny(path: Path, data: bytes, *, mode: int) -> bool:
        if path == root / refused:
            raise PermissionError(13, "Permission denied")
        return write_whole(path, data, mode=mode)

    monkeypatch.setattr("pipeline.versions.outcome.write_whole", deny)
    with pytest.raises(BumpRefused, match="Permission denied") as caught:
        write(root, outcome)
    assert caught.value.hint == hint
