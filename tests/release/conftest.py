"""A real registry on the loopback, Debian's docker-registry, in the ways it is met: plain, with a password, with TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "unit")]

import release_debian  # noqa: E402 - lies beside this file
import release_samples as samples  # noqa: E402
from release_faults import Proxy  # noqa: E402
from release_registries import PASSWORD, USER, Running, Secured, auth_of, running  # noqa: E402

from pipeline.release import cosign  # noqa: E402


@pytest.fixture(scope="session")
def programs() -> None:
    """The programs that these tests drive, installed from Debian where they are missing."""
    release_debian.ensure("docker-registry", "skopeo", "cosign", "oras", "htpasswd", "openssl")


@pytest.fixture(scope="session")
def plain(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("plain")) as one:
        yield one


@pytest.fixture(scope="session")
def guarded(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A registry that wants USER and PASSWORD."""
    folder = tmp_path_factory.mktemp("guarded")
    done = subprocess.run(
        ["htpasswd", "-niB", USER], input=PASSWORD, capture_output=True, text=True, check=True, timeout=300
    )
    (folder / "htpasswd").write_text(done.stdout)
    with running(folder, {"auth": {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}}) as one:
        yield one


@pytest.fixture(scope="session")
def secured(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=300)

    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=an authority of a test",
            "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-keyout", "own.key", "-out", "own.csr")
    (folder / "names").write_text(names)
    openssl("x509", "-req", "-in", "own.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "own.crt")  # fmt: skip
    tls = {"tls": {"certificate": str(folder / "own.crt"), "key": str(folder / "own.key")}}
    with running(folder / "registry", http=tls) as one:
        yield Secured(one.host, one.data, one.log, folder / "ca.crt")


@pytest.fixture
def trusted(secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secured:
    """The registry with TLS, its authority in a certs.d of this user."""
    place = tmp_path / "config" / "docker" / "certs.d" / secured.host
    place.mkdir(parents=True)
    (place / "ca.crt").write_bytes(secured.ca.read_bytes())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return secured


@pytest.fixture
def faulty(plain: Running) -> Iterator[Proxy]:
    """A proxy in front of the plain registry that fails as a test asks."""
    with Proxy(plain.host) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def key_pairs(programs: None, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Two key pairs of cosign, private and public."""
    return [samples.key_pair(tmp_path_factory.mktemp("keys")) for _ in range(2)]


@pytest.fixture
def keys(key_pairs: list[tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A key pair; its password is in the environment."""
    monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
    cosign._public_key.cache_clear()
    return key_pairs[0]


@pytest.fixture
def other_keys(keys: tuple[Path, Path], key_pairs: list[tuple[Path, Path]]) -> tuple[Path, Path]:
    """Another pair, of the same password."""
    return key_pairs[1]


@pytest.fixture
def docker_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of Docker's configuration, named in the environment."""
    home = tmp_path / "docker"
    home.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(home))
    for name in ("DOCKER_AUTH_CONFIG", "REGISTRY_AUTH_FILE"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def logged_in(docker_home: Path, guarded: Running) -> Running:
    """The registry with a password, which Docker's config.json knows."""
    (docker_home / "config.json").write_text(json.dumps({"auths": {guarded.host: auth_of(USER, PASSWORD)}}))
    return guarded


@pytest.fixture
def pipeline():
    """`pipeline` as a command of its own."""

    def run(*words: object, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *map(str, words)], cwd=cwd, env={**os.environ, **(env or {})},
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run
