"""Against other registries: a second implementation, which keeps referrers itself."""

from __future__ import annotations

import json
import subprocess

import cache_samples
import pytest
import release_debian
import release_samples as samples
from ports import free_port
from release_registries import NOBODY, QUICK, Running, attached, await_port, command, image

from pipeline.registry.client import Registry
from pipeline.release.cosign import Signer
from pipeline.release.images import read_image


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


def test_a_registry_that_keeps_referrers_itself(second, keys, pipeline, tmp_path):
    private, public = keys
    with Registry(second.host, NOBODY, QUICK) as registry:
        assert registry.manifest("second/none", "x") is None
        digest = image(registry, "second/one")
        assert registry.resolve("second/one", "one") == digest
        subject = registry.manifest("second/one", "one").descriptor()
        made = {attached(registry, "second/one", subject, f"application/vnd.test.{n}") for n in (1, 2)}
        assert {one.digest for one in registry.referrers("second/one", digest)} == made
        only = registry.referrers("second/one", digest, "application/vnd.test.2")
        assert len(only) == 1 and only[0].artifact_type == "application/vnd.test.2"
        built = samples.SampleImage(tmp_path)
        done = samples.release(registry, "second/trust", built, signer=Signer(str(private)), tag="one")
        assert not samples.release(registry, "second/trust", built, signer=Signer(str(private)), tag="one").new
        inner = read_image(registry, "second/trust", done.digest).images[0].digest
        assert len(registry.referrers("second/trust", inner)) == 3
    verified = pipeline("attestation", "verify", f"{second.host}/second/trust:one", "--key", public)
    assert verified.returncode == 0, verified.stderr + verified.stdout
    name = f"{second.host}/second/trust@{inner}"
    told = json.loads(command("oras", "discover", "--plain-http", "--format", "json", name))
    assert len(told["manifests"]) == 3
    cache_samples.write(tmp_path / "root", "NVIDIA H200")
    name = f"oci://{second.host}/second/caches:one"
    assert pipeline("cache", "push", tmp_path / "root", name).returncode == 0
    assert pipeline("cache", "pull", name, "-o", tmp_path / "back").returncode == 0
    assert pipeline("cache", "diff", tmp_path / "root", tmp_path / "back").returncode == 0
