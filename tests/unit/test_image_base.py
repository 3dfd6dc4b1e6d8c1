"""A bootstrapped base: what a killed bootstrap leaves, when it is made again. No engine, and no Debian mirror."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contract.errors import BuildError
from pipeline.daemon import engine_from
from pipeline.image import base
from pipeline.image.containers import Ended
from pipeline.image.resolve import from_name
from pipeline.image.session import Session
from pipeline.tune.steps import process_state

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# Stands for mmdebstrap: fills its temporary folder, says who it is, and takes as long as the first run lets it.
FAKE = """#!/bin/sh
echo half > "$TMPDIR/half-made"
echo $$ > "{folder}/inside"
[ ! -e "{folder}/wait" ] || sleep 600
for word; do case "$word" in *.tar) echo tar > "$word" ;; esac; done
"""


class Engine:
    """As much of the SDK's client as a base needs: images by name, with the day on which they were made."""

    def __init__(self, **images: str) -> None:
        self.made = dict(images)
        self.images = self.api = self
        self.removed: list[str] = []

    def get(self, name: str) -> Any:
        from docker.errors import ImageNotFound

        if name not in self.made:
            raise ImageNotFound(name)
        when = self.made[name]
        return SimpleNamespace(attrs={"Id": f"sha256:{when}", "Created": when, "RepoDigests": [], "Config": {}})

    def import_image(self, *, src: str, repository: str, tag: str, changes: list[str]) -> None:
        assert Path(src).read_text() == "tar\n" and changes
        self.made[f"{repository}:{tag}"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())

    def remove(self, name: str) -> None:
        self.removed.append(name)


def a_session(home: Path, client: Any) -> Session:
    info = {"ServerVersion": "28.5.2", "OSType": "linux", "Architecture": "x86_64"}
    return Session(engine_from("unix:///x", "DOCKER_HOST", info, "1.51"), client, home, home / "log")


def bootstrap(home: Path, client: Any = None) -> base.Base:
    return base.obtain_bootstrapped(a_session(home, client or Engine()), base.BASE_NAME, "bookworm")


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mmdebstrap").write_text(FAKE.format(folder=tmp_path))
    (tmp_path / "bin" / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(base, "_mirrors", lambda _suite: [])
    monkeypatch.setattr(base, "run_one", lambda *_words, **_more: Ended(0, "bash\t5.2\nlibc6\t2.36\n", ()))


def test_what_a_killed_bootstrap_leaves_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_image_base as t; from pathlib import Path\n"
    code += f"t.base._mirrors = lambda _suite: []; t.bootstrap(Path({str(tmp_path / 'home')!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "inside").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    # In namespaces of its own it does not know its number here: the one that was started, and all below it, must go.
    ours = [pid for pid in processes() if str(tmp_path).encode() in cmdline(pid) and pid != process.pid]
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    if base._alone_in_namespaces():
        while any(process_state(pid) not in ("", "Z") for pid in ours):
            assert time.monotonic() < deadline, "mmdebstrap outlived the run that started it"
            time.sleep(0.05)
        assert ours
    left = tmp_path / "home" / "base" / "bootstrap"
    assert list(left.rglob("half-made"))
    (tmp_path / "wait").unlink()
    assert bootstrap(tmp_path / "home").origin == "bootstrapped"
    assert list(left.iterdir()) == []


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_base_is_made_again_when_it_is_old_and_both_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = base._reference(base.BASE_NAME, "bookworm")
    client = Engine(**{reference: "2020-01-02T00:00:00"})
    assert bootstrap(tmp_path, client).image_id != "sha256:2020-01-02T00:00:00"
    said = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert said[0] == "base made on 2020-01-02, older than 30 days: made again" and len(said) == 3
    assert client.removed == ["sha256:2020-01-02T00:00:00"]
    monkeypatch.setattr(base, "_mmdebstrap", None)
    again = bootstrap(tmp_path, client)
    (line,) = capsys.readouterr().err.splitlines()
    record = next(Path(word) for word in line.split() if word.endswith(".json"))
    assert '"libc6": "2.36"' in record.read_text() and again.image_id in record.read_text()


def test_an_old_base_that_cannot_be_renewed_is_used_and_a_warning_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> None:
        raise BuildError("no mirror answers")

    monkeypatch.setattr(base, "_mmdebstrap", refuse)
    old = "2020-01-02T00:00:00"
    client = Engine(**{base._reference(base.BASE_NAME, "bookworm"): old})
    assert bootstrap(tmp_path, client).image_id == f"sha256:{old}"
    assert "cannot be renewed: no mirror answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reference", "digests", "origin", "containerd", "named"),
    [
        ("debian:12", ["debian@sha256:1"], "given", False, "debian@sha256:1"),
        ("host:5000/a/b:c", ["x@sha256:1", "host:5000/a/b@sha256:1"], "present", False, "host:5000/a/b@sha256:1"),
        ("debian:12", [], "given", False, "debian:12"),  # of this engine alone
        ("mine:1", ["debian@sha256:1"], "given", False, "mine:1"),  # another name of a pulled one
        ("debian:12", ["debian@sha256:1"], "given", True, "debian:12"),
        ("debian:12", ["debian@sha256:1"], "pulled", True, "debian@sha256:1"),
    ],
)
def test_a_base_that_a_registry_knows_is_built_on_by_digest(
    reference: str, digests: list[str], origin: str, containerd: bool, named: str, tmp_path: Path
) -> None:
    attrs = {"Id": "sha256:0", "RepoDigests": digests, "Config": {}}
    client: Any = SimpleNamespace(images=SimpleNamespace(get=lambda _name: SimpleNamespace(attrs=attrs)))
    found = base.find(client, reference, origin)
    place = a_session(tmp_path, client)
    assert found is not None
    assert from_name(replace(place, engine=replace(place.engine, containerd_store=containerd)), found) == named


def test_bases_of_other_packages_have_other_names() -> None:
    names = [base._reference(name, suite) for name in base._INCLUDE for suite in ("bookworm", "trixie")]
    assert len(set(names)) == len(names)
