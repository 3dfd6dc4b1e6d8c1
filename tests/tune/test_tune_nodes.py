"""Two hosts that tune together: two network namespaces, each with its own name, address and folders.

They have nothing in common but the cable between them. The first saves; when one disappears, the other names it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tune_harness import ROOT, Tuner, read_manifest, write_plan

sys.path.append(str(ROOT / "tests" / "release"))

import release_debian

from pipeline.cache.integrity import check_root

pytestmark = [pytest.mark.flashinfer, pytest.mark.once]

ENDPOINT = "10.213.0.1:29500"


@dataclass(frozen=True)
class Host:
    """A network namespace with the address 10.213.0.<rank + 1> on its device e0, a host's name, and a folder."""

    rank: int
    name: str
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def said(self) -> str:
        """What its node wrote to stderr."""
        return (self.folder / "log").read_text()

    def start(self, tuner: Tuner, plan: Path, *words: str, fault: str = "") -> subprocess.Popen[bytes]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        command = [tuner.python, "-m", "pipeline.tune", str(plan), str(self.out), "--compare", "off", *words]
        command += ["--nnodes", "2", "--node-rank", str(self.rank), "--rdzv-endpoint", ENDPOINT]
        self.folder.mkdir()
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *named, *command], stdout=log, stderr=log, start_new_session=True,
                env={**tuner.environment(fault), "GLOO_SOCKET_IFNAME": "e0", "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
            )  # fmt: skip

    def disappear(self) -> None:
        """As a host whose power fails: it sends no message. The cable first, so that no connection is closed properly."""
        ip("-n", self.name, "link", "set", "e0", "down")
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        for pid in map(int, pids.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    two = (Host(0, f"first-{os.getpid()}", tmp_path / "0"), Host(1, f"second-{os.getpid()}", tmp_path / "1"))
    release_debian.ensure("ip")
    try:
        ip("netns", "add", two[0].name)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', error)}")
    try:
        ip("netns", "add", two[1].name)
        ip("link", "add", "e0", "netns", two[0].name, "type", "veth", "peer", "name", "e0", "netns", two[1].name)
        for host in two:
            ip("-n", host.name, "address", "add", f"10.213.0.{host.rank + 1}/24", "dev", "e0")
            for device in ("lo", "e0"):
                ip("-n", host.name, "link", "set", device, "up")
        yield two
    finally:
        for host in two:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


@contextlib.contextmanager
def started(hosts: tuple[Host, Host], tuner: Tuner, plan: Path, *words: str, fault: str = "") -> Iterator[Any]:
    nodes = [host.start(tuner, plan, *words, fault=fault) for host in hosts]
    try:
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(60)


def test_two_hosts_of_one_rank_each_tune_one_plan(
    hosts: tuple[Host, Host], tuner: Tuner, make_plan: Any, tmp_path: Path
) -> None:
    with started(hosts, tuner, write_plan(make_plan(), tmp_path / "plan.json")) as nodes:
        assert [node.wait(600) for node in nodes] == [0, 0], hosts[0].said + hosts[1].said
    assert "the first node saves the cache" in hosts[1].said
    tree, findings = check_root(hosts[0].out)
    assert [str(finding) for finding in findings] == []
    assert len(tree.keys) == 1
    assert not list(hosts[1].out.rglob("*.json"))
    manifest = read_manifest(hosts[0].out)
    assert [one.rank for one in manifest.ranks] == [0, 1]
    assert [one.entries for one in manifest.ranks] == [5, 5]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_disappears_is_named_and_nothing_is_saved(
    gone: int, hosts: tuple[Host, Host], tuner: Tuner, make_plan: Any, tmp_path: Path
) -> None:
    plan, stays = write_plan(make_plan(), tmp_path / "plan.json"), hosts[1 - gone]
    with started(hosts, tuner, plan, "--timeout", "6", fault="slow") as nodes:
        while "tuning" not in stays.said:
            assert nodes[1 - gone].poll() is None, stays.said
            time.sleep(0.1)
        hosts[gone].disappear()
        began = time.monotonic()
        assert nodes[1 - gone].wait(300) == 6, stays.said
    (error,) = [line for line in stays.said.splitlines() if line.startswith("error: ")]
    assert hosts[gone].name in error, stays.said
    assert time.monotonic() - began < 60, "about the timeout and its margin"
    for host in hosts:
        assert not list(host.out.rglob("*.json"))
