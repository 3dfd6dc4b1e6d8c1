"""Programs of Debian that tests drive, installed by root where they are missing; nothing of it starts as a service."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.contract.errors import DockerError
from pipeline.daemon import debian

# program -> package; what Debian 12 lacks comes from Debian 13, by the source that the engine's packages come by
PACKAGES = {
    "docker-registry": "docker-registry", "skopeo": "skopeo", "htpasswd": "apache2-utils", "openssl": "openssl",
    "cosign": "cosign", "oras": "oras", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client",
    "munged": "munge", "jq": "jq", "ip": "iproute2",
}  # fmt: skip


def ensure(*programs: str) -> None:
    """Install what is missing. Only a person who is not root, outside CI, may go without."""
    missing = [PACKAGES[name] for name in programs if debian.program(name) is None]
    if not missing:
        return
    if os.geteuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip(f"needs {', '.join(missing)}, and only root can install it")
    log = Path(tempfile.mkstemp(prefix="apt-", suffix=".log")[1])
    try:
        _install(missing, log)
    except DockerError as error:
        raise AssertionError(f"{error.message}\n" + "\n".join(error.details) + log.read_text()[-2000:]) from error
    assert [name for name in programs if debian.program(name) is None] == []


def _install(names: Sequence[str], log: Path) -> None:
    debian.install(names, log, newer_suite=True)


def second_registry(folder: Path) -> Path:
    """Compile the registry of Debian's golang-github-google-go-containerregistry-dev, and return the program.

    The packages are fetched and unpacked below `folder`, not installed: nothing of the host moves for a test.
    """
    ensure("docker-registry")  # root, and Debian 13's source beside Debian 12's
    library = "golang-github-google-go-containerregistry-dev"
    if subprocess.run(["apt-cache", "show", library], capture_output=True, check=False).returncode != 0:
        _install(["docker-registry"], folder / "apt.log")  # adds the source, updates the lists
    told = subprocess.run(["apt-cache", "depends", "golang-go"], capture_output=True, text=True, check=True).stdout
    version = next(w for w in re.findall(r"Depends: golang-([0-9.]+)-go", told))
    packages_needed = [library, f"golang-{version}-go", f"golang-{version}-src"]
    _quiet(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *packages_needed], folder)
    for deb in folder.glob("*.deb"):
        _quiet(["dpkg", "-x", str(deb), str(folder / "root")], folder)
    sources = folder / "own" / "src" / "second"
    shutil.copytree(Path(__file__).parent / "second", sources)
    compiler = folder / "root" / "usr" / "lib" / f"go-{version}"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "GOROOT": str(compiler), "GOCACHE": str(folder / "cache"),
        "GOPATH": f"{folder / 'own'}:{folder / 'root/usr/share/gocode'}", "GO111MODULE": "off", "CGO_ENABLED": "0",
    }  # fmt: skip
    _quiet([str(compiler / "bin" / "go"), "build", "-o", str(folder / "second"), "."], sources, env)
    return folder / "second"


def _quiet(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
