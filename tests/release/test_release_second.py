"""Against other registries: a second implementation that keeps referrers itself, and token servers (a stand-in)."""

from __future__ import annotations

import json
import subprocess

import cache_samples
import pytest
import release_debian
import release_samples as samples
from release_registries import NOBODY, QUICK, Running, attached, await_port, command, image
from test_release_trust import everything

from pipeline.registry.client import Registry
from pipeline.release.seal import seal
from pipeline.release.sign import Signer
from pipeline.tune.ports import free_port


@pytest.fixture(scope="module")
def second(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    program = release_debian.second_registry(folder)
    port, log = free_port(), folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([str(program), f"127.0.0.1:{port}"], stdout=out, stderr=subprocess.STDOUT)
    try:
        await_port(port, process, log)
        yield Running(f"127.0.0.1:{port}", folder / "none", log)
    finally:
        process.terminate()
        process.wait(120)


def test_a_registry_that_keeps_referrers_itself(second, pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
    private, public = samples.key_pair(tmp_path / "keys")
    with Registry(second.host, NOBODY, QUICK) as registry:
        assert registry.tags("second/none") == () and registry.manifest("second/none", "x") is None
        digest = image(registry, "second/one")
        assert registry.resolve("second/one", "one") == digest
        subject = registry.manifest("second/one", "one").descriptor()
        made = {attached(registry, "second/one", subject, f"application/vnd.test.{n}") for n in (1, 2)}
        assert {one.digest for one in registry.referrers("second/one", digest)} == made
        only = registry.referrers("second/one", digest, "application/vnd.test.2")
        assert len(only) == 1 and only[0].artifact_type == "application/vnd.test.2"
        sample = samples.push(registry, "second/trust", tmp_path)
        seal(registry, sample.reference, everything(sample), Signer(str(private)))
        seal(registry, sample.reference, everything(sample), Signer(str(private)))
        assert len(registry.referrers("second/trust", sample.reference.digest)) == 3
    done = pipeline("attestation", "verify", sample.reference, "--key", public)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(command("oras", "discover", "--plain-http", "--format", "json", str(sample.reference)))
    assert len(told["manifests"]) == 3
    cache_samples.write(tmp_path / "root", "NVIDIA H200")
    name = f"oci://{second.host}/second/caches:one"
    assert pipeline("cache", "push", tmp_path / "root", name).returncode == 0
    assert pipeline("cache", "pull", name, "-o", tmp_path / "back").returncode == 0
    assert pipeline("cache", "diff", tmp_path / "root", tmp_path / "back").returncode == 0
