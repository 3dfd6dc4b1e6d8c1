"""Locks are held against their .in files and versions.json, offline."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.versions import load
from pipeline.versions.check import check
from pipeline.versions.lock import pinned
from pipeline.versions.requirements import read_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("templates", "docker", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "versions.json", tmp_path)
    return tmp_path


def found(root: Path, path: str, edit: Callable[[str], str]) -> list[str]:
    before = (root / path).read_text(encoding="utf-8")
    after = edit(before)
    assert after != before
    (root / path).write_text(after, encoding="utf-8")
    return [finding.text() for finding in check(root).findings]


def test_this_checkout_agrees() -> None:
    assert [finding.text() for finding in check(ROOT).findings] == []


def test_every_lock_has_its_direct_dependencies_and_a_reason_for_each() -> None:
    for name in load(ROOT).locks:
        rows = (ROOT / f"requirements/{name}.in").read_text(encoding="utf-8").splitlines()
        direct = [row for row in rows if row and not row.startswith(("#", "-"))]
        assert direct and all("  # " in row for row in direct), name
        assert pinned((ROOT / f"requirements/{name}.txt").read_bytes())


def test_no_lock_names_an_index_or_a_path() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text and "/opt" not in text, path


def test_locks_of_images_hold_for_both_architectures() -> None:
    """No marker: pip evaluates those for the machine that downloads, not for the image."""
    for name in ("image-cpu", "image-cuda", "compiler-cuda"):
        pins = read_text((ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8"), "").pins
        assert pins and all(pin.marker is None for pin in pins), name


CASES = [
    ("host.txt", lambda t: t.replace("docker==7.2.0", "docker==7.1.9"), "requirements/host.txt:1: was edited by hand"),
    (
        "image-cpu.txt",
        lambda t: t.replace("torch==2.13.0+cpu", "torch==2.12.0+cpu"),
        "requirements/image-cpu.txt:1: was edited by hand",
    ),
    ("image-cpu.txt", lambda t: t.replace("torch==2.13.0+cpu", "torch==2.13.0"), "torch==2.13.0 is no CPU build (+cpu)"),
    (
        "image-cuda.txt",
        lambda t: t.replace("torch==2.13.0 ", "torch==2.13.0+cpu "),
        "torch==2.13.0+cpu is a CPU build, and this lock is not for CPUs",
    ),
    (
        "image-cpu.txt",
        lambda t: t + f"nvidia-cublas==13.1.1.3 \\\n    --hash=sha256:{'0' * 64}\n",
        "nvidia-cublas is for CUDA, and this lock is for CPUs",
    ),
    (
        "image-cpu.txt",
        lambda t: t + "triton==3.7.1\n",
        "triton has no sha256 hash",
    ),
    ("image-cuda.txt", lambda t: t[: t.index("torch==")], "requirements/image-cuda.txt:1: was edited by hand"),
    ("image-cuda.txt", lambda t: t.replace("tqdm==", "tqdm>="), "tqdm>=4.70.1 is no pin"),
    ("dev.txt", lambda t: t.replace("docker==7.2.0", "docker==7.1.9"), "docker==7.1.9; requirements/host.txt pins 7.2.0"),
    ("host.txt", lambda t: t.replace("# pins sha256:", "# pins sha256:0"), "requirements/host.txt:1: was edited by hand"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "edit", "expected"), CASES)
def test_a_lock_that_was_edited_is_found(tree: Path, file: str, edit: Callable[[str], str], expected: str) -> None:
    assert any(expected in line for line in found(tree, f"requirements/{file}", edit))


def test_a_new_requirement_needs_a_new_lock(tree: Path) -> None:
    template = tree / "templates/requirements/host.in.j2"
    template.write_text(template.read_text(encoding="utf-8").replace("\ndocker ", "\ndocker>=7 "), encoding="utf-8")
    lines = [finding.text() for finding in check(tree).findings]
    assert "requirements/host.in:5: differs from its template; run `pipeline versions sync`" in lines
    assert any(line.startswith("requirements/host.txt:1: was compiled from other requirements") for line in lines)


def test_a_version_that_was_moved_without_its_locks_is_found(tree: Path) -> None:
    now = load(tree)["FLASHINFER_VERSION"]
    lines = found(tree, "versions.json", lambda text: text.replace(now, "9.9"))
    assert any("requirements/image-cpu.txt" in line and "versions.json says 9.9" in line for line in lines)
    assert any("requirements/image-cuda.in" in line and "differs from its template" in line for line in lines)


def test_a_missing_lock_is_found(tree: Path) -> None:
    (tree / "requirements/compiler-cuda.txt").unlink()
    assert [finding.text() for finding in check(tree).findings] == [
        "requirements/compiler-cuda.txt: is missing; `pipeline versions bump --refresh` compiles it"
    ]
