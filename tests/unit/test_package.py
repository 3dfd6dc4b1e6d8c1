"""The package that pip installs: its metadata, and that it works outside its checkout, on a project that it made."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from pipeline import project

ROOT = Path(__file__).resolve().parents[2]
UV = [sys.executable, "-m", "uv", "--quiet", "--offline"]


@dataclass(frozen=True)
class Installed:
    wheel: Path
    environment: Path

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.environment / "bin" / "pipeline"), *words], cwd=cwd, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, which finds its dependencies in this one."""
    place = tmp_path_factory.mktemp("package")
    environment = place / "environment"
    build = ["build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(place), str(ROOT)]
    for words in (build, ["venv", "--python", sys.executable, str(environment)]):
        subprocess.run([*UV, *words], check=True)
    (wheel,) = place.glob("*.whl")
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(environment / "bin" / "python")
    subprocess.run([*UV, "pip", "install", "--no-deps", "--python", python, str(wheel)], check=True)
    return Installed(wheel, environment)


def test_the_metadata_is_valid_and_names_what_the_host_needs(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(archive.read(name), validate=True)
        assert not any(name.startswith(("tests/", "bench/", "docs/")) for name in archive.namelist())
    assert (metadata.name, metadata.description_content_type) == ("tuned-image-pipeline", "text/markdown")
    needed = re.findall(r"^([\w.-]+)", (ROOT / "requirements" / "host.in").read_text(), re.MULTILINE)
    assert sorted(Requirement(str(one)).name for one in metadata.requires_dist or ()) == sorted(needed)
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all(re.search(rf"^{one}\b", (ROOT / "requirements" / "dev.in").read_text(), re.MULTILINE) for one in backend)


def test_a_new_project_is_green_and_a_version_that_differs_in_it_is_found(installed: Installed, tmp_path: Path) -> None:
    done = installed.run("init", "images", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    project = tmp_path / "images"
    names = {path.name for path in project.iterdir()}
    assert names == {"versions.json", "templates", "docker", "requirements", "Makefile", ".gitignore", ".github"}
    (project / ".venv").symlink_to(installed.environment)
    (installed.environment / "ready").touch()
    done = subprocess.run(
        ["make", "--no-print-directory", "check"], cwd=project, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert "every version agrees" in done.stderr
    file = project / "docker" / "Dockerfile"
    file.write_text(re.sub(r"ARG FLASHINFER_VERSION=\S+", "ARG FLASHINFER_VERSION=0.1.0", file.read_text()))
    below = installed.run("versions", "check", "--root", "..", cwd=project / "docker")
    assert below.returncode == 3 and "ARG FLASHINFER_VERSION=0.1.0" in below.stdout


def test_a_project_decides_which_versions_its_folders_use(installed: Installed, tmp_path: Path) -> None:
    assert installed.run("init", "images", cwd=tmp_path).returncode == 0
    versions = tmp_path / "images" / "versions.json"
    before = installed.run("plan", "tiny", "--json", cwd=tmp_path)
    versions.write_text(re.sub(r'("FLASHINFER_VERSION": {\s*"default": ")[^"]+', r"\g<1>0.6.16", versions.read_text()))
    inside = installed.run("plan", "tiny", "--json", cwd=tmp_path / "images" / "docker")
    assert before.returncode == inside.returncode == 0, inside.stderr
    assert '"flashinfer_version": "0.6.16"' in inside.stdout and '"0.6.16"' not in before.stdout


def test_a_project_is_begun_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "new", tmp_path / "empty"):
        with monkeypatch.context() as stopped:
            stopped.setattr(project, "_FILES", {"Makefile": "Makefile", "gone": "gone"})
            with pytest.raises(FileNotFoundError):
                project.create(place)
        assert [path.name for path in tmp_path.iterdir()] == ["empty"] or place.name == "empty"
        assert not list((tmp_path / "empty").iterdir())
        assert tmp_path / place.name / "Makefile" in project.create(place)


def test_a_folder_with_files_is_left_alone(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text("mine")
    done = installed.run("init", ".", cwd=tmp_path)
    assert done.returncode == 2 and "is not an empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["versions.json"]
