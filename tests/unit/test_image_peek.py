"""A look at an image by a push to ourselves: against a pusher that asks what Docker's engine asks."""

from __future__ import annotations

import gzip
import io
import json
import socket
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from pipeline.contract.digest import sha256_bytes
from pipeline.image import peek as module
from pipeline.image.peek import NoPeek, look, peek
from pipeline.image.peekregistry import LARGEST_MANIFEST, Registry, serving
from pipeline.image.saved import SMALL, saved_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def sha(data: bytes) -> str:
    return f"sha256:{sha256_bytes(data)}"


def tar(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name in names:
            made.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


class Image:
    """Blobs and manifests as the engine has them; `layers` are tars, bottom first, and stored compressed."""

    def __init__(self, *layers: bytes, arch: str = "amd64", sizes: dict[int, int] | None = None) -> None:
        self.diff_ids = [sha(one) for one in layers]
        config = {"os": "linux", "architecture": arch, "rootfs": {"diff_ids": self.diff_ids}}
        self.config = json.dumps(config).encode()
        packed = [gzip.compress(one, mtime=0) for one in layers]
        self.blobs = {sha(self.config): self.config} | {sha(one): one for one in packed}
        said = [
            {"mediaType": LAYER, "digest": sha(one), "size": (sizes or {}).get(at, len(one))}
            for at, one in enumerate(packed)
        ]
        value = {
            "schemaVersion": 2, "mediaType": MANIFEST, "layers": said,
            "config": {"digest": sha(self.config), "size": len(self.config)},
        }  # fmt: skip
        self.manifest = json.dumps(value).encode()


def attestation() -> Image:
    made = Image(b"{}")
    made.manifest = made.manifest.replace(LAYER.encode(), b"application/vnd.in-toto+json")
    return made


class Engine:
    """The parts of the SDK's client that a look uses; `images` are pushed under an index where there are several."""

    def __init__(self, *images: Image, newer: bool = False) -> None:
        self.stored, self.newer = images, newer
        self.names: list[str] = []
        self.held: list[str] = []
        self.freed_while_held: list[bool] = []
        self.statuses: list[tuple[str, str, int]] = []
        self.api = SimpleNamespace(timeout=60, remove_container=lambda name, **_: self.held.remove(name))
        self.images = self
        self.containers = SimpleNamespace(create=lambda *_, name, **_options: self.held.append(name))
        index = {"mediaType": INDEX, "manifests": [{"digest": sha(one.manifest)} for one in images]}
        self.top = images[0].manifest if len(images) == 1 else json.dumps(index).encode()
        self.change: dict[str, bytes] = {}
        self.fail: BaseException | None = None

    def get(self, _name: str) -> Any:
        attrs = {
            "Id": sha(self.top), "Os": "linux", "Architecture": "amd64", "RootFS": {"Layers": self.stored[0].diff_ids},
        }  # fmt: skip
        return SimpleNamespace(attrs=attrs, tag=lambda repository, tag: self.names.append(f"{repository}:{tag}"))

    def remove(self, name: str, *, force: bool, noprune: bool) -> None:
        from docker.errors import ImageNotFound

        self.freed_while_held.append(bool(self.held) and force and noprune)
        if name not in self.names:
            raise ImageNotFound(name)
        self.names.remove(name)

    def push(self, repository: str, *, tag: str, auth_config: dict[str, str], **_: Any) -> Iterator[dict[str, Any]]:
        assert auth_config == {}
        assert self.names == [f"{repository}:{tag}"]
        assert self.api.timeout < 60
        if self.fail is not None:
            raise self.fail
        host, _, self.path = repository.partition("/")
        self.address = host
        yield {"status": "The push refers to a repository"}
        try:
            self._push(tag)
        except RuntimeError as error:
            yield {"error": str(error)}

    def _push(self, tag: str) -> None:
        with ThreadPoolExecutor(8) as pool:
            blobs = {digest: data for image in self.stored for digest, data in image.blobs.items()}
            list(pool.map(lambda item: self._blob(*item), blobs.items()))
            children = [image.manifest for image in self.stored if image.manifest != self.top]
            if self.newer:
                for one in children:
                    self._ask("PUT", f"manifests/{sha(one)}", one)
            else:
                list(pool.map(lambda one: self._ask("PUT", f"manifests/{tag}", one), children))
        self._ask("PUT", f"manifests/{tag}", self.top)

    def _blob(self, digest: str, data: bytes) -> None:
        if self._ask("HEAD", f"blobs/{digest}", missing=True) == 404:
            self._ask("POST", "blobs/uploads/")
            self._ask("PUT", f"blobs/uploads/one?digest={quote(digest)}", self.change.get(digest, data))

    def _ask(self, method: str, path: str, body: bytes | None = None, *, missing: bool = False) -> int:
        try:
            status = ask(self.address, method, f"/v2/{self.path}/{path}", body)
        except (OSError, HTTPException) as error:
            raise RuntimeError(str(error)) from error
        self.statuses.append((method, path.partition("/")[0], status))
        if status >= 400 and not (missing and status == 404):
            raise RuntimeError(f"{method} {path}: {status}")
        return status


def ask(address: str, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    connection = HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def clean(engine: Engine) -> None:
    assert (engine.names, engine.held, engine.api.timeout) == ([], [], 60)
    assert engine.freed_while_held == [True], (
        "without its container the engine would remove an image without other names"
    )
    if engine.statuses:
        with pytest.raises(OSError):
            ask(engine.address, "GET", "/v2/")


BASE, ONE, TWO = tar("etc/base"), tar("opt/one"), tar("opt/two", "stray")


def test_a_look_gives_what_an_export_gives() -> None:
    image = Image(BASE, ONE, TWO)
    engine: Any = Engine(image)
    files = look(engine, "x", count=2)
    clean(engine)
    saved = saved_of(files, "x", count=2)
    assert saved.config_digest == sha(image.config)
    assert saved.diff_ids == tuple(image.diff_ids)
    assert saved.last == (("opt/two", "stray"), ("opt/one",))
    entry = json.loads(files["index.json"])["manifests"][0]
    assert files["blobs/sha256/" + entry["digest"][7:]] == image.manifest
    uploads = [one for one in engine.statuses if one[:2] == ("PUT", "blobs")]
    assert uploads == [("PUT", "blobs", 201)] * 3, "the configuration and two layers, and nothing of the base"
    taken = [status for method, kind, status in engine.statuses if (method, kind) == ("PUT", "manifests")]
    assert taken == [400, 400], "a push that went well leaves a note on the engine's blobs"


@pytest.mark.parametrize("newer", [False, True])
def test_of_an_index_the_engine_s_own_platform_is_taken(newer: bool) -> None:
    mine, theirs = Image(BASE, ONE), Image(BASE, ONE, arch="arm64")
    engine: Any = Engine(mine, attestation(), theirs, Image(BASE, TWO, arch="arm"), newer=newer)
    saved = saved_of(look(engine, "x", count=1), "x", count=1)
    clean(engine)
    assert (saved.config_digest, saved.last) == (sha(mine.config), (("opt/one",),))
    assert not [one for one in engine.statuses if one[:2] == ("PUT", "manifests") and one[2] == 201 and not newer]


def test_a_large_layer_is_not_asked_for() -> None:
    engine: Any = Engine(Image(BASE, ONE, sizes={1: SMALL + 1}))
    assert saved_of(look(engine, "x", count=1), "x", count=1).last == (None,)
    clean(engine)


def test_more_layers_may_be_asked_for_than_there_are() -> None:
    engine: Any = Engine(Image(ONE))
    assert saved_of(look(engine, "x", count=3), "x", count=3).last == (("opt/one",),)


@pytest.mark.parametrize("which", ["config", "layer"])
@pytest.mark.parametrize("by", [b"", b"longer than was said", b"x"])
def test_other_bytes_than_the_manifest_names_are_not_taken(which: str, by: bytes) -> None:
    image = Image(BASE, ONE)
    engine: Any = Engine(image)
    digest = sha(image.config) if which == "config" else json.loads(image.manifest)["layers"][1]["digest"]
    right = image.blobs[digest]
    engine.change[digest] = right + by if len(by) > 1 else by * len(right)
    with pytest.raises(NoPeek):
        look(engine, "x", count=1)
    clean(engine)
    assert peek(engine, "x", count=1) is None


@pytest.mark.parametrize("manifest", [b"", b"[]", b'{"layers": 3}', b'{"layers": [{}, {}]}', b"{}"])
def test_a_manifest_of_another_shape_is_no_answer(manifest: bytes) -> None:
    image = Image(BASE, ONE)
    image.manifest = manifest
    engine: Any = Engine(image)
    with pytest.raises(NoPeek):
        look(engine, "x", count=1)
    clean(engine)


def test_an_image_of_other_layers_than_the_engine_names_is_no_answer() -> None:
    engine: Any = Engine(Image(BASE, ONE))
    engine.stored[0].diff_ids = [sha(BASE), sha(TWO)]
    with pytest.raises(NoPeek, match="0 of 1 manifests"):
        look(engine, "x", count=1)
    clean(engine)


def faults() -> list[BaseException]:
    from docker.errors import APIError, StreamParseError
    from requests.exceptions import ReadTimeout
    from urllib3.exceptions import ProtocolError

    return [APIError("denied"), ReadTimeout(), ProtocolError(), StreamParseError(""), BrokenPipeError()]


@pytest.mark.parametrize("fault", faults(), ids=lambda one: type(one).__name__)
def test_a_push_that_fails_is_no_answer_and_leaves_nothing(fault: BaseException) -> None:
    engine: Any = Engine(Image(BASE, ONE))
    engine.fail = fault
    assert peek(engine, "x", count=1) is None
    clean(engine)


def test_a_push_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Engine(Image(BASE, ONE))
    monkeypatch.setattr(module, "_LIMIT", 0.0)
    with pytest.raises(NoPeek, match="longer"):
        look(engine, "x", count=1)
    clean(engine)


def test_an_interrupt_leaves_nothing_in_the_engine() -> None:
    engine: Any = Engine(Image(BASE, ONE))
    engine.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        peek(engine, "x", count=1)
    clean(engine)


def test_an_interrupted_naming_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Engine(Image(BASE, ONE))
    given: list[str] = []

    def interrupted(repository: str, tag: str) -> None:
        given.append(f"{repository}:{tag}")
        raise KeyboardInterrupt

    found = engine.get("x")
    found.tag = interrupted
    engine.get = lambda _name: found
    monkeypatch.setattr(module.time, "sleep", lambda _s: engine.names.extend(given))  # the engine was still at it
    with pytest.raises(KeyboardInterrupt):
        peek(engine, "x", count=1)
    assert (engine.names, engine.held) == ([], [])


def test_an_interrupted_unnaming_is_done_again() -> None:
    engine: Any = Engine(Image(BASE, ONE))
    remove, interrupts = engine.remove, [KeyboardInterrupt()]

    def interrupted(name: str, **options: bool) -> None:
        if interrupts:
            raise interrupts.pop()
        remove(name, **options)

    engine.remove = interrupted
    with pytest.raises(KeyboardInterrupt):
        peek(engine, "x", count=1)
    clean(engine)


def test_a_name_that_stays_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from docker.errors import APIError

    engine: Any = Engine(Image(BASE, ONE))

    def refuse(name: str, **_: object) -> None:
        raise APIError(f"no: {name}")

    engine.remove = refuse
    assert peek(engine, "x", count=1) is not None
    assert "the engine keeps the name 127.0.0.1:" in capsys.readouterr().err


def test_a_tls_handshake_is_answered_in_plain_http() -> None:
    with serving(Registry("a/b", "sha256:0")) as repository:
        host, _, port = repository.partition("/")[0].partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"\x16\x03\x01\x00\x05hello")
            assert connection.recv(5) == b"HTTP/", "what Go's TLS takes for a server without TLS"


def test_the_registry_answers_its_own_repository_alone() -> None:
    registry = Registry("a/b", "sha256:0")
    with serving(registry) as repository:
        host = repository.partition("/")[0]
        assert ask(host, "GET", "/v2/") == 200
        assert ask(host, "HEAD", "/v2/a/b/blobs/sha256:1") == 200
        assert ask(host, "HEAD", "/v2/a/b/manifests/x") == 404
        assert ask(host, "GET", "/v2/a/b/blobs/sha256:1") == 404
        for method, path in (
            ("HEAD", "/v2/a/c/blobs/sha256:1"), ("POST", "/v2/a/c/blobs/uploads/"), ("PUT", "/v2/a/c/manifests/x"),
            ("PUT", "/x"),
        ):  # fmt: skip
            assert ask(host, method, path, b"{}") == 404
        assert ask(host, "PUT", "/v2/a/b/blobs/uploads/one?digest=sha256:1", b"{}") == 400
        assert ask(host, "PUT", "/v2/a/b/manifests/sha256:1", b"{}") == 400
        assert ask(host, "PATCH", "/v2/a/b/blobs/uploads/one", b"{}") == 501
        assert registry.manifests == registry.blobs == {}


def test_more_than_was_agreed_is_not_read() -> None:
    registry = Registry("a/b", "sha256:0")
    registry.want({"sha256:1": 3})
    with serving(registry) as repository:
        host, _, port = repository.partition("/")[0].partition(":")
        for path, size in (
            ("blobs/uploads/one?digest=sha256:1", "4"), ("manifests/x", str(LARGEST_MANIFEST + 1)), ("manifests/x", "-1"),
        ):  # fmt: skip
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(f"PUT /v2/a/b/{path} HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode())
                assert b" 413 " in connection.recv(100)
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"PUT /v2/a/b/manifests/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert b" 411 " in connection.recv(100)
    assert registry.manifests == registry.blobs == {}
