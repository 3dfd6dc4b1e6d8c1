"""`pipeline versions bump` on trees whose packages come from a folder of wheels: no network, the real pip and uv."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from versions_trees import plant, source, texts

from pipeline.__main__ import main
from pipeline.versions.check import check
from pipeline.versions.lock import pinned, pip_config

GOVERNS = {
    "TOP_VERSION": {"packages": ["top"]},
    "IMAGE_VERSION": {"images": ["python"], "begins_with": "PYTHON_VERSION"},
}
VALUES = {"TOP_VERSION": "1.0", "PYTHON_VERSION": "3.11", "IMAGE_VERSION": "3.11.4"}
FILES = {
    "templates/Dockerfile.j2": "ARG TOP_VERSION={{ TOP_VERSION }}\nFROM python:{{ IMAGE_VERSION }}-slim\n",
    "templates/requirements/app.in.j2": "top=={{ TOP_VERSION }}  # the reason\n",
}


def wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> None:
    """A wheel without code."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"] + [f"Requires-Dist: {one}" for one in requires]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip is configured for a folder of wheels and for no index."""
    folder = tmp_path / "wheels"
    for version in ("1", "2", "3"):
        wheel(folder, "b", f"{version}.0")
        wheel(folder, "c", f"{version}.0")
    wheel(folder, "top", "1.0", "b", "c<3")
    wheel(folder, "top", "2.0", "b>=2", "c>=2,<3", "extra")
    wheel(folder, "top", "3.0", "missing")
    wheel(folder, "extra", "1.0")
    plant(tmp_path, {"pip.conf": f"[global]\nno-index = true\nfind-links = {folder}\n"})
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return folder


@pytest.fixture
def root(tmp_path: Path, wheels: Path) -> Path:
    """A tree whose lock was compiled."""
    locks = {"app": {"python": "${PYTHON_VERSION}", "for": "any system"}}
    tree = plant(tmp_path / "tree", {"versions.json": source(VALUES, GOVERNS, locks=locks), **FILES})
    assert main(["versions", "sync", "--root", str(tree)]) == 0
    assert main(["versions", "bump", "--refresh", "--root", str(tree)]) == 0
    assert check(tree).findings == []
    return tree


def bump(root: Path, *words: str) -> int:
    return main(["versions", "bump", *words, "--root", str(root)])


def state(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_move_writes_source_files_and_locks(root: Path, wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pinned((root / "requirements/app.txt").read_bytes()) == {"top": "1.0", "b": "3.0", "c": "2.0"}
    assert bump(root, "TOP_VERSION=2.0") == 0
    captured = capsys.readouterr()
    assert pinned((root / "requirements/app.txt").read_bytes()) == {
        "top": "2.0",
        "b": "3.0",
        "c": "2.0",
        "extra": "1.0",
    }
    assert "TOP_VERSION 1.0 -> 2.0" in captured.err and "extra new -> 1.0" in captured.err
    assert '+    "TOP_VERSION"' not in captured.out and "+ARG TOP_VERSION=2.0" in captured.out
    text = (root / "requirements/app.txt").read_text()
    digest = hashlib.sha256((wheels / "top-2.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert f"--hash=sha256:{digest}" in text and str(wheels) not in text
    assert "from a folder on the disk of whoever compiled this" in text
    assert texts(check(root).findings) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["TOP_VERSION=2.5"], "the index has no top 2.5"),
        (["TOP_VERSION=3.0"], "requirements/app.in cannot be compiled"),
        (["TOP_VERSION=0.5"], "would go down from 1.0 to 0.5"),
        (["TOP_VERSION=v2.0"], "no version of a package"),
        (["TOP_VERSIN=2.0"], 'has no TOP_VERSIN; did you mean "TOP_VERSION"?'),
        (["TOP_VERSION"], "is not NAME=VERSION"),
        (["TOP_VERSION=2.0", "TOP_VERSION=2.0"], "given twice"),
        (["TOP_VERSION=2.0", "--offline"], "must be compiled (app)"),
        (["--latest", "PYTHON_VERSION"], "decides no package's version"),
        ([], "nothing to move"),
    ],
)
def test_a_move_that_is_refused_writes_nothing(
    root: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(root)
    assert bump(root, *words) == 2
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err
    assert state(root) == before


def test_what_would_disagree_is_listed_and_nothing_is_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(root, {"docker/by-hand.sh": "pip install top==1.0\n"})
    before = state(root)
    assert bump(root, "TOP_VERSION=2.0") == 3
    assert "docker/by-hand.sh:1: top==1.0, versions.json says 2.0 (TOP_VERSION)" in capsys.readouterr().err
    assert state(root) == before


def test_names_that_are_tied_move_together(root: Path) -> None:
    assert bump(root, "IMAGE_VERSION=3.12.9") == 0
    text = (root / "versions.json").read_text()
    assert '"3.12"' in text and '"3.12.9"' in text
    assert (root / "docker/Dockerfile").read_text().endswith("FROM python:3.12.9-slim\n")
    assert bump(root, "PYTHON_VERSION=3.13") == 0
    assert (root / "docker/Dockerfile").read_text().endswith("FROM python:3.13-slim\n")
    assert check(root).findings == []


def test_a_dry_run_and_a_downgrade(root: Path) -> None:
    before = state(root)
    assert bump(root, "TOP_VERSION=2.0", "--dry-run") == 0
    assert state(root) == before
    assert bump(root, "TOP_VERSION=2.0") == 0
    assert bump(root, "TOP_VERSION=1.0", "--allow-downgrade") == 0
    assert {**state(root), "requirements/app.txt": b""} == {**before, "requirements/app.txt": b""}


def test_upgrade_moves_what_nobody_decides_on(root: Path, wheels: Path) -> None:
    wheel(wheels, "b", "4.0")
    assert bump(root, "--refresh") == 0
    assert pinned((root / "requirements/app.txt").read_bytes())["b"] == "3.0"
    assert bump(root, "--upgrade", "b") == 0
    assert pinned((root / "requirements/app.txt").read_bytes())["b"] == "4.0"


def test_an_answer_that_differs_between_architectures_is_refused(
    root: Path, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(wheels, "top", "4.0", "b==1; platform_machine=='x86_64'", "b==2; platform_machine!='x86_64'")
    text = (root / "versions.json").read_text().replace('"any system"', '"linux"')
    plant(root, {"versions.json": text})
    before = state(root)
    assert bump(root, "TOP_VERSION=4.0") == 2
    assert "would differ between x86_64 and aarch64: b==1.0, b==2.0" in capsys.readouterr().err
    assert state(root) == before


def test_a_lock_says_for_which_architecture_there_was_no_wheel(root: Path, wheels: Path) -> None:
    wheel(wheels, "top", "5.0+cpu", tag="cp311-cp311-manylinux_2_28_x86_64")
    text = (root / "versions.json").read_text().replace('"any system"', '"linux"')
    plant(root, {"versions.json": text, "templates/requirements/app.in.j2": "top=={{ TOP_VERSION }}+cpu\n"})
    assert bump(root, "TOP_VERSION=5.0") == 3  # a CPU build in a lock that is not for CPUs
    plant(root, {"versions.json": text.replace('"linux"', '"linux", "cpu": true')})
    assert bump(root, "TOP_VERSION=5.0") == 0
    assert (
        "# x86_64 alone: the indexes that were asked have no top==5.0+cpu for aarch64"
        in (root / "requirements/app.txt").read_text()
    )


def test_a_package_without_what_it_requires_elsewhere(root: Path) -> None:
    text = (root / "versions.json").read_text().replace('"any system"', '"any system", "without": ["missing"]')
    plant(root, {"versions.json": text})
    assert bump(root, "TOP_VERSION=3.0") == 0
    assert pinned((root / "requirements/app.txt").read_bytes()) == {"top": "3.0"}


def test_a_file_that_cannot_be_written_leaves_all_as_it_was(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.versions import render

    real, before = render.write_whole, state(root)

    def full(path: Path, data: bytes, *, mode: int = 0o644) -> bool:
        if path.name == "app.txt" and b"2.0" in data and b"extra" in data:
            raise OSError(28, "No space left on device")
        return real(path, data, mode=mode)

    monkeypatch.setattr(render, "write_whole", full)
    assert bump(root, "TOP_VERSION=2.0") == 2
    assert "requirements/app.txt cannot be written: No space left on device" in capsys.readouterr().err
    assert state(root) == before


def test_pip_s_configuration_is_handed_to_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = (
        "[global]\nindex-url = https://one.invalid/simple\nextra-index-url = https://two.invalid/simple\n"
        " https://three.invalid/simple\ncert = /ca.pem\nproxy = http://proxy.invalid:1\ntrusted-host = two.invalid\n"
        "[install]\nindex-url = https://four.invalid/simple\n"
    )
    plant(tmp_path, {"pip.conf": conf})
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.setenv("PIP_CERT", "/other.pem")
    config = pip_config()
    words = " ".join(config.words)
    assert config.main == "https://four.invalid/simple"
    assert "--index https://four.invalid/simple --index https://two.invalid/simple --index https://three" in words
    assert "--find-links /one --find-links /two" in words and "--allow-insecure-host two.invalid" in words
    assert config.environment["SSL_CERT_FILE"] == "/other.pem"
    assert config.environment["ALL_PROXY"] == "http://proxy.invalid:1"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/simple"])
def test_an_index_that_is_down(root: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path, {"pip.conf": f"[global]\nindex-url = {url}\nretries = 0\n"})
    before = state(root)
    assert bump(root, "TOP_VERSION=2.0") == 2
    err = capsys.readouterr().err
    assert "requirements/app.in cannot be compiled" in err and "Traceback" not in err
    assert state(root) == before
