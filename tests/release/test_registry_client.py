"""The registry client against Debian's docker-registry: what it stores and reads, and what it does when that fails."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from ports import free_port
from release_registries import NOBODY, QUICK, attached, command, image, running
from release_standin import Standin

from pipeline.contract.errors import Exit
from pipeline.registry.client import Registry, list_tag
from pipeline.registry.descriptors import MANIFEST
from pipeline.registry.errors import InvalidResponse, NotFound, RegistryError

SLOW = replace(QUICK, silence=1.5)  # tells a registry that says nothing from a busy machine


def test_blobs_and_manifests_go_there_and_back(plain, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        big = tmp_path / "big"
        big.write_bytes(os.urandom(1 << 20) * 24)
        tracemalloc.start()
        made = registry.put_blob("there/back", big)
        with (tmp_path / "back").open("w+b") as out:
            registry.fetch_blob("there/back", made.digest, out, limit=made.size)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (tmp_path / "back").read_bytes() == big.read_bytes() and made.size == 24 << 20
        assert peak < 12 << 20, f"{peak} bytes for a blob of {made.size}"
        assert registry.has_blob("there/back", made.digest)
        assert not registry.has_blob("there/back", "sha256:" + "0" * 64)
        (tmp_path / "empty").write_bytes(b"")
        assert registry.blob("there/back", registry.put_blob("there/back", tmp_path / "empty").digest) == b""
        digest = image(registry, "there/back")
        assert registry.resolve("there/back", "one") == digest
        found = registry.manifest("there/back", "one")
        assert found is not None and found.digest == digest and found.media_type == MANIFEST
        named = found.descriptor()
        assert (named.annotations, named.artifact_type) == ({"a": "b"}, "application/vnd.test")
        assert registry.manifest("there/back", digest) == found
        assert registry.manifest("there/back", "none") is None and registry.resolve("no/where", "x") is None
    seen = json.loads(
        command("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{plain.host}/there/back:one")
    )
    assert seen["annotations"] == {"a": "b"}


def test_a_blob_above_its_limit_and_an_unknown_one_are_refused(plain):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        made = registry.put_blob("limits", b"x" * 1000)
        with pytest.raises(InvalidResponse):
            registry.blob("limits", made.digest, limit=999)
        with pytest.raises(NotFound):
            registry.blob("limits", "sha256:" + "0" * 64)


def test_referrers_without_the_api_are_kept_under_the_tag(plain):
    """docker-registry 2.8 has no referrers API: oras must find what we attached, and we what oras attached."""
    with Registry(plain.host, NOBODY, QUICK) as registry:
        image(registry, "refers", "subject")
        subject = registry.manifest("refers", "subject").descriptor()
        one = attached(registry, "refers", subject, "application/vnd.test.one")
        two = attached(registry, "refers", subject, "application/vnd.test.two")
        assert attached(registry, "refers", subject, "application/vnd.test.one") == one  # once only
        assert [r.digest for r in registry.referrers("refers", subject.digest)] == [one, two]
        only = registry.referrers("refers", subject.digest, "application/vnd.test.two")
        assert [r.digest for r in only] == [two] and only[0].annotations == {"kind": "application/vnd.test.two"}
        assert registry.referrers("refers", "sha256:" + "0" * 64) == ()
        name = f"{plain.host}/refers@{subject.digest}"
        told = json.loads(command("oras", "discover", "--plain-http", "--format", "json", name))
        assert {m["digest"] for m in told["manifests"]} == {one, two}
        command("oras", "attach", "--plain-http", "--artifact-type", "application/vnd.test.three", name,
                "--annotation", "by=oras", "--disable-path-validation", str(Path(__file__)) + ":text/plain")  # fmt: skip
        found = registry.referrers("refers", subject.digest, "application/vnd.test.three")
        assert len(found) == 1 and registry.manifest("refers", found[0].digest).json()["annotations"]["by"] == "oras"
        assert registry.resolve("refers", list_tag(subject.digest)) is not None


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ({"status": 500}, "answered 500"),
        ({"status": 503}, "answered 503"),
        ({"status": 429, "headers": {"Retry-After": "0"}}, "answered 429"),
        ({"drop": "now"}, "no connection"),
        ({"drop": "request", "method": "PUT"}, "no connection"),
        ({"wait": 3.0, "method": "HEAD"}, "did not answer"),
    ],
)
def test_what_passes_is_tried_again_and_what_stays_ends_with_8(fault, what, faulty):
    path = "uploads" if fault.get("drop") == "request" else "."
    passing = faulty.fail(**fault, path=path, times=2)
    with Registry(faulty.host, NOBODY, SLOW if "wait" in fault else QUICK) as registry:
        content = os.urandom(200_000)
        made = registry.put_blob("faulty/one", content)
        assert passing.hits == 2 and registry.blob("faulty/one", made.digest) == content
        staying = faulty.fail(**fault, path=path)
        with pytest.raises(RegistryError, match=what) as caught:
            registry.put_blob("faulty/one", os.urandom(200_000))
        assert staying.hits >= QUICK.tries and caught.value.exit_code == Exit.PUBLISH and caught.value.hint


@pytest.mark.parametrize(
    ("fault", "kind", "what"),
    [
        ({"status": 507}, RegistryError, "has no room"),
        ({"status": 413}, RegistryError, "has no room"),
        ({"status": 403, "message": "quota of the project is used up"}, RegistryError, "has no room"),
        ({"status": 403, "message": "requested access to the resource is denied"}, RegistryError, "denied"),
        ({"status": 405, "code": "UNSUPPORTED", "message": "read only"}, RegistryError, "read only"),
        ({"status": 400, "code": "DIGEST_INVALID"}, InvalidResponse, "DIGEST_INVALID"),
        ({"status": 404, "code": "NAME_UNKNOWN"}, NotFound, "NAME_UNKNOWN"),
        ({"status": 401}, RegistryError, "401"),
        ({"status": 302}, InvalidResponse, "302"),
    ],
)
def test_a_refusal_is_final(fault, kind, what, faulty):
    refusing = faulty.fail(**fault, method="PUT|POST")
    with Registry(faulty.host, NOBODY, QUICK) as registry, pytest.raises(kind, match=what) as caught:
        registry.put_blob("refused/one", os.urandom(1000))
    assert refusing.hits == 1 and caught.value.hint
    assert str(fault["status"]) in caught.value.message and caught.value.exit_code == Exit.PUBLISH


def test_a_full_disk_says_so_after_its_tries(faulty):
    faulty.fail(status=500, method="PUT", message="{'Enclosed': {'Op': 'write', 'Err': 28}}")
    with Registry(faulty.host, NOBODY, QUICK) as registry, pytest.raises(RegistryError, match="has no room"):
        registry.put_blob("full/one", os.urandom(1000))


def test_a_registry_that_takes_long_to_store_a_blob_is_waited_for(faulty):
    """It copies and hashes a large one before it answers: that is no silence, and nothing is sent twice."""
    faulty.fail(method="PUT", path="uploads", wait=2.5)
    with Registry(faulty.host, NOBODY, SLOW) as registry:
        registry.put_blob("slow/commit", os.urandom(1000))
        assert faulty.count("PUT") == 1


def test_an_upload_whose_answer_was_lost_is_not_sent_again(faulty):
    faulty.fail(method="PUT", path="uploads", drop="response")
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        registry.put_blob("lost/answer", os.urandom(1000))
        assert faulty.count("PUT") == 1


def test_retry_after_is_honoured_up_to_its_cap(faulty):
    faulty.fail(status=429, headers={"Retry-After": "1"}, times=1)
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        registry.resolve("polite", "x")
        assert faulty.seen[-1].at - faulty.seen[0].at >= 0.95
        faulty.fail(status=429, headers={"Retry-After": "3600"})
        before = len(faulty.seen)
        with pytest.raises(RegistryError, match="3600 s"):
            registry.resolve("polite", "x")
        assert len(faulty.seen) == before + 1
        faulty.faults[-1].headers = {"Retry-After": "soon"}
        with pytest.raises(RegistryError):
            registry.resolve("polite", "x")


def test_a_blob_that_breaks_off_is_read_again_and_a_changed_one_is_refused(faulty):
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        content = os.urandom(3_000_000)
        made = registry.put_blob("broken/one", content)
        dropped = faulty.fail(method="GET", path="blobs", drop="response", times=2)
        assert registry.blob("broken/one", made.digest) == content
        assert dropped.hits == 2
        faulty.fail(method="GET", path="blobs", drop="response")
        with pytest.raises((RegistryError, InvalidResponse)) as caught:
            registry.blob("broken/one", made.digest)
        assert caught.value.exit_code == Exit.PUBLISH
        faulty.faults[-1] = changed = type(dropped)(method="GET", change=True)
        with pytest.raises(InvalidResponse):
            registry.blob("broken/one", made.digest)
        image(registry, "broken/one")
        with pytest.raises(InvalidResponse):
            registry.manifest("broken/one", "one")
        assert changed.hits == 2


def test_where_nobody_listens_is_said_at_once_unless_a_registry_was_there_before():
    """A wrong port is no reason to wait; a registry that restarts is."""
    began = time.monotonic()
    with Registry(f"127.0.0.1:{free_port()}", NOBODY) as registry, pytest.raises(RegistryError, match="refused"):
        registry.resolve("any", "x")
    assert time.monotonic() - began < 5
    gone = 404, {"Connection": "close"}, b""
    with (
        Standin(lambda _: gone) as server,
        Registry(server.host, NOBODY, replace(QUICK, tries=8, pause=0.1)) as registry,
    ):
        assert registry.resolve("any", "x") is None
        server.__exit__()
        restarted = Standin(lambda _: gone, port=server.server_port)
        threading.Timer(0.5, restarted.__enter__).start()
        assert registry.resolve("any", "x") is None
        restarted.__exit__()


def test_a_registry_that_sends_byte_by_byte_is_given_up(faulty):
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        image(registry, "drips")
    with Registry(faulty.host, NOBODY, replace(QUICK, silence=1.0)) as registry:
        faulty.fail(method="GET", drip=0.5)  # some three minutes for the whole
        began = time.monotonic()
        with pytest.raises(RegistryError, match="less than 10 kB"):
            registry.manifest("drips", "one")
        assert time.monotonic() - began < 60


def test_lists_in_pages_are_followed_and_end():
    entry = {"mediaType": MANIFEST, "size": 3, "artifactType": "application/vnd.test"}

    def ask(request):
        page = int(request.query.get("page", 1))
        body = json.dumps({"manifests": [entry | {"digest": f"sha256:{page:064}"}]}).encode()
        following = 2 if page == 1 else page  # the second names itself for ever
        return 200, {"Link": f'<{request.path}?page={following}>; rel="next"'}, body

    with Standin(ask) as server, Registry(server.host, NOBODY, QUICK) as registry:
        found = registry.referrers("some/where", "sha256:" + "0" * 64)
    assert [one.digest[-1] for one in found] == ["1", "2"]


def test_a_registry_that_one_may_only_read_is_noticed_without_pushing(programs, faulty, tmp_path):
    reading = {"storage": {"filesystem": {"rootdirectory": str(tmp_path / "data")},
                           "maintenance": {"readonly": {"enabled": True}}}}  # fmt: skip
    refused = pytest.raises(RegistryError, match="may be pushed to")
    with running(tmp_path, reading) as one, Registry(one.host, NOBODY, QUICK) as registry, refused:
        registry.check_writable("some/where")
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        registry.check_writable("probe/fine")
        assert [(seen.method, seen.size) for seen in faulty.seen] == [("POST", 0), ("DELETE", 0)]
        faulty.fail(method="DELETE", status=500)  # then the registry forgets the upload in time
        registry.check_writable("probe/fine")
        faulty.fail(method="POST", status=507)
        with pytest.raises(RegistryError):
            registry.check_writable("probe/fine")
