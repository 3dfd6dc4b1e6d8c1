"""`pipeline versions bump` with the real pip and uv: packages come from a folder of wheels, or from an index of the test.

What a build then fetches by a lock is tested here as well: the wheel that is named, or none.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from versions_trees import plant, source, texts

from pipeline.__main__ import main
from pipeline.contract.errors import BuildError
from pipeline.image.probe import BaseFacts
from pipeline.image.wheels import ensure_wheelhouse
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels and a tree whose lock was compiled from it, to copy from."""
    place = tmp_path_factory.mktemp("made")
    folder = place / "wheels"
    for version in ("1.0", "2.0", "3.0"):
        wheel(folder, "b", version)
        wheel(folder, "c", version)
    wheel(folder, "top", "1.0", "b", "c<3")
    wheel(folder, "top", "2.0", "b>=2", "c>=2,<3", "extra")
    wheel(folder, "top", "3.0", "missing")
    wheel(folder, "extra", "1.0")
    locks = {"app": {"python": "${PYTHON_VERSION}", "for": "any system"}}
    tree = plant(place / "tree", {"versions.json": source(VALUES, GOVERNS, locks=locks), **FILES})
    with pytest.MonkeyPatch.context() as patch:
        configure(patch, place, f"no-index = true\nfind-links = {folder}")
        assert main(["versions", "sync", "--root", str(tree)]) == 0
        assert main(["versions", "bump", "--refresh", "--root", str(tree)]) == 0
    assert check(tree).findings == []
    return place


def configure(patch: pytest.MonkeyPatch, place: Path, settings: str) -> None:
    """Let pip read these settings and no others."""
    plant(place, {"pip.conf": f"[global]\n{settings}\n"})
    patch.setenv("PIP_CONFIG_FILE", str(place / "pip.conf"))
    patch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def wheels(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip is configured for a folder of wheels and for no index."""
    shutil.copytree(made / "wheels", tmp_path / "wheels")
    configure(monkeypatch, tmp_path, f"no-index = true\nfind-links = {tmp_path / 'wheels'}")
    return tmp_path / "wheels"


@pytest.fixture
def root(made: Path, tmp_path: Path, wheels: Path) -> Path:
    """A tree whose lock was compiled."""
    return shutil.copytree(made / "tree", tmp_path / "tree")


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
        (["TOP_VERSION=v2.0"], "no version of a package"),
        (["TOP_VERSIN=2.0"], 'has no TOP_VERSIN; did you mean "TOP_VERSION"?'),
        (["TOP_VERSION"], "is not NAME=VERSION"),
        (["TOP_VERSION=2.0", "TOP_VERSION=2.0"], "given twice"),
        (["TOP_VERSION=2.0", "--offline"], "must be compiled (app)"),
        (["--latest", "PYTHON_VERSION"], "decides no package's version"),
        ([], "nothing to move"),
        (["TOP_VERSION=abc"], "TOP_VERSION=abc: TOP_VERSION is 'abc', which is no version of a package"),
        (["--upgrade", "nowhere"], "no lock pins nowhere"),
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


def test_a_dry_run_writes_nothing_and_a_move_can_be_taken_back(root: Path) -> None:
    before = state(root)
    assert bump(root, "TOP_VERSION=2.0", "--dry-run") == 0
    assert state(root) == before
    assert bump(root, "TOP_VERSION=2.0") == 0
    assert bump(root, "TOP_VERSION=1.0") == 0
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
    assert config.extra == ("https://two.invalid/simple", "https://three.invalid/simple")
    assert "--index https://four.invalid/simple --index https://two.invalid/simple --index https://three" in words
    assert "--find-links /one --find-links /two" in words and "--allow-insecure-host two.invalid" in words
    assert config.environment["SSL_CERT_FILE"] == "/other.pem"
    assert config.environment["ALL_PROXY"] == "http://proxy.invalid:1"
    assert config.environment["UV_PYTHON_DOWNLOADS"] == "never"  # uv would ask another host than pip's


# ---- an index


class Index:
    """A package index over a folder of wheels; `status` answers every request, `yanked` are withdrawn versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status = 200
        self.yanked: set[str] = set()

    def answer(self, path: str) -> bytes | None:
        """The bytes of a page or a file; None where there is none."""
        if path.startswith("/files/"):
            return (self.folder / unquote(path.rpartition("/")[2])).read_bytes()
        name = path.strip("/").rpartition("/")[2]
        rows = []
        for file in sorted(self.folder.glob(f"{name}-*.whl")):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            mark = ' data-yanked="a bad build"' if "-".join(file.name.split("-")[:2]) in self.yanked else ""
            rows.append(f'<a href="/files/{file.name}#sha256={digest}"{mark}>{file.name}</a>')
        return "\n".join(rows).encode() or None


@pytest.fixture
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """pip is configured for an index, and for no folder."""
    found = Index(wheels)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = found.answer(self.path) if found.status == 200 else None
            self.send_response(found.status if data is not None or found.status != 200 else 404)
            self.send_header("Content-Type", "application/octet-stream" if "/files/" in self.path else "text/html")
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            if data and self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    configure(monkeypatch, wheels.parent, f"index-url = http://127.0.0.1:{server.server_port}/simple\nretries = 0")
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["down", "500"])
def test_an_index_that_does_not_answer_is_named_and_nothing_is_written(
    root: Path, tmp_path: Path, index: Index, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    index.status = 500
    if kind == "down":
        configure(monkeypatch, tmp_path, "index-url = http://127.0.0.1:9/simple\nretries = 0")
    before = state(root)
    assert bump(root, "TOP_VERSION=2.0") == 2
    err = capsys.readouterr().err
    assert "requirements/app.in cannot be compiled" in err and "Traceback" not in err
    assert "http://127.0.0.1:" in err and ("500 Internal Server Error" in err) is (kind == "500")
    assert state(root) == before


def test_a_version_that_the_index_lacks_is_refused_with_the_nearest(root: Path, index: Index, capsys: Any) -> None:
    before = state(root)
    assert bump(root, "TOP_VERSION=2.0.1") == 2
    assert 'the index has no top 2.0.1: nothing was written\nhint: did you mean "2.0"?' in capsys.readouterr().err
    assert state(root) == before


def test_what_was_yanked_is_said_and_kept_until_it_is_moved(root: Path, index: Index, capsys: Any) -> None:
    index.yanked = {"top-2.0", "b-3.0"}
    assert bump(root, "TOP_VERSION=2.0") == 0
    err = capsys.readouterr().err
    assert '`top==2.0` is yanked (reason: "a bad build")' in err and "`b==3.0` is yanked" in err
    assert pinned((root / "requirements/app.txt").read_bytes())["b"] == "3.0"
    assert bump(root, "--upgrade", "b") == 0
    assert pinned((root / "requirements/app.txt").read_bytes())["b"] == "2.0"
    assert bump(root, "--latest", "TOP_VERSION") == 2  # 3.0 requires what nobody has
    assert "missing" in capsys.readouterr().err


# ---- what a build fetches by a lock

FACTS = BaseFacts("3.11", "x86_64", (2, 36), {})


def fetch(root: Path, lock: Path) -> list[str]:
    session: Any = SimpleNamespace(home=root / "home", log=root / "log")
    house = ensure_wheelhouse(session, lock, FACTS)
    return sorted(path.name for path in house.path.iterdir())


def test_a_build_takes_the_wheels_of_the_lock_and_stops_at_any_other(root: Path, wheels: Path, index: Index) -> None:
    lock = root / "requirements/app.txt"
    names = ["b-3.0-py3-none-any.whl", "c-2.0-py3-none-any.whl", "requirements.txt", "top-1.0-py3-none-any.whl"]
    index.yanked = {"top-1.0"}
    assert fetch(root, lock) == names  # yanked since: a lock still has it
    shutil.rmtree(root / "home")
    wheel(wheels, "b", "3.0", "os-of-somebody-else")
    with pytest.raises(BuildError, match=r"an index has another wheel than app\.txt names by its hash") as caught:
        fetch(root, lock)
    assert any("b==3.0" in line for line in caught.value.details), caught.value.details
    assert "pipeline versions bump --refresh" in caught.value.hint
    assert not list((root / "home/wheels").glob("[0-9a-f]*"))


def test_a_user_without_the_index_of_torch_s_cpu_builds_gets_a_hint(root: Path, wheels: Path, index: Index) -> None:
    wheel(wheels, "torch", "2.0")
    lock = plant(root, {"torch.txt": f"torch==2.0+cpu --hash=sha256:{'0' * 64}\n"}) / "torch.txt"
    with pytest.raises(BuildError, match=r"lacks a wheel of torch\.txt: .*torch==2\.0\+cpu") as caught:
        fetch(root, lock)
    assert "torch for CPUs lies on an index of PyTorch's" in caught.value.hint
    wheel(wheels, "torch", "2.0+cpu")  # an index that has another build of it
    with pytest.raises(BuildError, match="another wheel than") as caught:
        fetch(root, lock)
    assert any("torch==2.0+cpu" in line for line in caught.value.details)
