"""Starting Debian's docker-registry, and what tests of registries share."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port

from pipeline.registry.client import Registry
from pipeline.registry.credentials import Credentials
from pipeline.registry.descriptors import EMPTY, MANIFEST, Descriptor, Manifest
from pipeline.registry.http import RetryPolicy

USER, PASSWORD = "builder", "pa55-word+of/builder"


@dataclass(frozen=True)
class Running:
    """A registry: its host, where its files lie, what it logged."""

    host: str
    data: Path
    log: Path

    def blobs(self) -> set[str]:
        """Hex digests of all blobs that are stored."""
        return {path.parent.name for path in self.data.glob("docker/registry/v2/blobs/sha256/*/*/data")}


@dataclass(frozen=True)
class Secured(Running):
    """A registry with TLS, whose certificate `ca` alone vouches for."""

    ca: Path


def await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@contextmanager
def running(
    folder: Path, config: dict[str, object] | None = None, http: dict[str, Any] | None = None
) -> Iterator[Running]:
    """Start docker-registry with its files below `folder`; end it on leaving."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "version": "0.1",
        "log": {"level": "info", "accesslog": {"disabled": False}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}", **(http or {})},
        **(config or {}),
    }
    (folder / "config.yml").write_text(json.dumps(whole))  # JSON is YAML
    log = folder / "registry.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")], stdout=out, stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
        )  # fmt: skip
    try:
        await_port(port, process, log)
        yield Running(f"127.0.0.1:{port}", folder / "data", log)
    finally:
        process.terminate()
        process.wait(120)


def auth_of(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def command(*words: object, env: dict[str, str] | None = None) -> str:
    """Run a program that must succeed, and return what it printed."""
    done = subprocess.run(
        list(map(str, words)), env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def watched() -> Iterator[list[str]]:
    """Argument vectors of every process of this machine that was alive at some moment, looked at all the time."""
    seen: set[str] = set()
    found: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words not in seen:
                        seen.add(words)
                        found.append(words)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(10)


QUICK = RetryPolicy(tries=3, pause=0.01, longest=2.0, connect=5.0, silence=20.0, commit=20.0)
NOBODY = Credentials()


def image(registry: Registry, repository: str, tag: str = "one", content: bytes = b"layer") -> str:
    """A small artifact under a tag; returns its digest."""
    config = registry.put_blob(repository, b"{}", EMPTY)
    layer = registry.put_blob(repository, content)
    made = {
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "application/vnd.test",
        "config": config.to_json(), "layers": [layer.to_json()], "annotations": {"a": "b"},
    }  # fmt: skip
    return registry.put_manifest(repository, Manifest.of(json.dumps(made).encode()), tag)


def attached(registry: Registry, repository: str, subject: Descriptor, kind: str) -> str:
    config = registry.put_blob(repository, b"{}", EMPTY)
    made = {
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "config": config.to_json(),
        "layers": [config.to_json()], "subject": subject.to_json(), "annotations": {"kind": kind},
    }  # fmt: skip
    return registry.put_manifest(repository, Manifest.of(json.dumps(made).encode()))
