"""The registry client against Debian's docker-registry: what it stores and reads, and what it does when that goes wrong."""

from __future__ import annotations

import json
import os
import re
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from release_registries import PASSWORD, USER, auth_of, command, running

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.exits import Exit
from pipeline.release import answers, errors, media
from pipeline.release.credentials import Credentials, Login, docker_config
from pipeline.release.descriptors import Descriptor
from pipeline.release.patience import Patience
from pipeline.release.reference import Reference, is_loopback
from pipeline.release.referrers import list_tag
from pipeline.release.registry import Registry
from pipeline.tune.ports import free_port

QUICK = Patience(tries=3, pause=0.01, longest=2.0, connect=5.0, silence=20.0, whole=60.0)
SLOW = replace(QUICK, silence=2.5)  # tells a registry that says nothing from a busy machine
NOBODY = Credentials()


def image(registry: Registry, repository: str, tag: str = "one", content: bytes = b"layer") -> str:
    """A small artifact under a tag; returns its digest."""
    config = registry.put_blob(repository, b"{}", media.EMPTY)
    layer = registry.put_blob(repository, content)
    made = {
        "schemaVersion": 2, "mediaType": media.MANIFEST, "artifactType": "application/vnd.test",
        "config": config.to_json(), "layers": [layer.to_json()], "annotations": {"a": "b"},
    }  # fmt: skip
    return registry.put_manifest(repository, tag, json.dumps(made).encode(), media.MANIFEST)


def attached(registry: Registry, repository: str, subject: Descriptor, kind: str) -> str:
    config = registry.put_blob(repository, b"{}", media.EMPTY)
    made = {
        "schemaVersion": 2, "mediaType": media.MANIFEST, "artifactType": kind, "config": config.to_json(),
        "layers": [config.to_json()], "subject": subject.to_json(), "annotations": {"kind": kind},
    }  # fmt: skip
    body = json.dumps(made).encode()
    return registry.put_manifest(repository, f"sha256:{sha256_bytes(body)}", body, media.MANIFEST)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:5000/a/b:one", ("127.0.0.1:5000", "a/b", "one", "")),
        ("localhost/a", ("localhost", "a", "", "")),
        ("registry.example.com/a:v1@sha256:" + "0" * 64, ("registry.example.com", "a", "v1", "sha256:" + "0" * 64)),
        ("tuned/tiny:tp2", ("", "tuned/tiny", "tp2", "")),
        ("[::1]:5000/a", ("[::1]:5000", "a", "", "")),
    ],
)
def test_references_are_read_and_written_back(text, parts):
    found = Reference.parse(text)
    assert (found.registry, found.repository, found.tag, found.digest) == parts
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    ["", "/", "a//b", "A/b", "host:5000/", "a:", "a:b:c", "a@sha256:12", "a@md5:00", "a b", "-a/b.c/x:..", "a/b:" + "x" * 129,
     "h.example/" + "a" * 250, "user:pass@host.example/a", "https://host.example/a", "a\n"],
)  # fmt: skip
def test_bad_references_end_with_2(text):
    with pytest.raises(errors.ReferenceInvalid) as caught:
        Reference.parse(text)
    assert caught.value.exit_code == Exit.USAGE and caught.value.hint


def test_loopback_is_what_docker_takes_for_it():
    assert all(map(is_loopback, ("localhost", "localhost:1", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000", "[::1]")))
    assert not any(
        map(is_loopback, ("localhost.example.com", "128.0.0.1", "10.0.0.1:5000", "registry.example.com:5000"))
    )


def test_blobs_and_manifests_go_there_and_back(plain, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        big = tmp_path / "big"
        big.write_bytes(os.urandom(1 << 20) * 24)
        tracemalloc.start()
        made = registry.put_blob("there/back", big)
        back = registry.save_blob("there/back", made.digest, tmp_path / "deep" / "back")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert back.read_bytes() == big.read_bytes() and made.size == 24 << 20
        assert peak < 12 << 20, f"{peak} bytes for a blob of {made.size}"
        assert registry.has_blob("there/back", made.digest) and not registry.has_blob(
            "there/back", "sha256:" + "0" * 64
        )
        (tmp_path / "empty").write_bytes(b"")
        assert registry.blob("there/back", registry.put_blob("there/back", tmp_path / "empty").digest) == b""
        digest = image(registry, "there/back")
        assert registry.resolve("there/back", "one") == digest
        found = registry.manifest("there/back", "one")
        assert found is not None and found.digest == digest and found.media_type == media.MANIFEST
        assert (
            found.descriptor().annotations == {"a": "b"} and found.descriptor().artifact_type == "application/vnd.test"
        )
        assert registry.manifest("there/back", digest) == found
        assert registry.manifest("there/back", "none") is None and registry.resolve("no/where", "x") is None
        assert registry.tags("there/back") == ("one",) and registry.tags("no/where") == ()
    seen = json.loads(
        command("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{plain.host}/there/back:one")
    )
    assert seen["annotations"] == {"a": "b"}


def test_a_blob_above_its_limit_and_an_unknown_one_are_refused(plain, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        made = registry.put_blob("limits", b"x" * 1000)
        with pytest.raises(errors.BlobBroken):
            registry.blob("limits", made.digest, limit=999)
        with pytest.raises(errors.NotInRegistry):
            registry.save_blob("limits", "sha256:" + "0" * 64, tmp_path / "none")
        assert list(tmp_path.iterdir()) == []


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
        assert list_tag(subject.digest) in registry.tags("refers")


def test_a_password_is_wanted_found_and_wrong(guarded, docker_home):
    with Registry(guarded.host, patience=QUICK) as registry, pytest.raises(errors.Unauthorized) as caught:
        registry.tags("any")
    assert caught.value.exit_code == Exit.PUBLISH and "docker login" in caught.value.hint
    config = docker_home / "config.json"
    config.write_text(json.dumps({"auths": {f"https://{guarded.host}/v1/": auth_of(USER, PASSWORD)}}))
    with Registry(guarded.host, patience=QUICK) as registry:
        digest = image(registry, "guarded/one")
        assert registry.resolve("guarded/one", "one") == digest
    config.write_text(json.dumps({"auths": {guarded.host: auth_of(USER, "wrong-" + PASSWORD)}}))
    with Registry(guarded.host, patience=QUICK) as registry, pytest.raises(errors.Unauthorized) as caught:
        registry.resolve("guarded/one", "one")
    assert PASSWORD not in str(caught.value) + caught.value.hint + repr(caught.value.details)


def test_credentials_come_from_helpers_variables_and_files(guarded, docker_home, tmp_path, monkeypatch):
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    told = json.dumps({"ServerURL": guarded.host, "Username": USER, "Secret": PASSWORD})
    helper.write_text(
        f'#!/bin/sh\n[ "$1" = get ] || exit 2\nread -r host\necho "$host" >> {tmp_path}/asked\n'
        f"[ \"$host\" = {guarded.host} ] || {{ echo 'credentials not found in native keychain'; exit 1; }}\n"
        f"cat <<'END'\n{told}\nEND\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    config = docker_home / "config.json"
    for stored in ({"credHelpers": {guarded.host: "test"}}, {"credsStore": "test", "auths": {guarded.host: {}}}):
        config.write_text(json.dumps(stored))
        with Registry(guarded.host, patience=QUICK) as registry:
            registry.tags("any")
        assert Credentials.load().login("other.example.com") is None
    config.write_text("{}")
    both = json.dumps({"auths": {guarded.host: auth_of(USER, PASSWORD)}})
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", both)
    assert Credentials.load().login(guarded.host) == Login(USER, PASSWORD)
    monkeypatch.delenv("DOCKER_AUTH_CONFIG")
    (tmp_path / "auth.json").write_text(both)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    assert Credentials.load().login(guarded.host) == Login(USER, PASSWORD)
    assert PASSWORD not in repr(Credentials.load()) + repr(Credentials.load().login(guarded.host))
    with docker_config({guarded.host: Login(USER, PASSWORD)}) as home:  # other programs can be handed it
        assert home.stat().st_mode & 0o77 == 0 and (home / "config.json").stat().st_mode & 0o77 == 0
        name = f"docker://{guarded.host}/guarded/two:one"
        monkeypatch.delenv("REGISTRY_AUTH_FILE")
        with Registry(guarded.host, Credentials.load({"DOCKER_CONFIG": str(home)}), QUICK) as registry:
            image(registry, "guarded/two")
        command("skopeo", "inspect", "--raw", "--tls-verify=false", "--authfile", home / "config.json", name)
    assert not home.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"auths": {"HOST": {"auth": "!secret!"}}}', "not user:password in base64"),
        ('{"credsStore": "../../bin/sh"}', "not the name of a credential helper"),
        ('{"credsStore": "of-nobody"}', "not on PATH"),
        ('{"credsStore": "broken"}', "failed"),
    ],
)
def test_a_broken_configuration_ends_with_2_and_is_not_shown(text, what, guarded, docker_home, tmp_path, monkeypatch):
    broken = tmp_path / "docker-credential-broken"
    broken.write_text("#!/bin/sh\necho secret\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (docker_home / "config.json").write_text(text.replace("HOST", guarded.host))
    with pytest.raises(errors.CredentialsUnreadable, match=re.escape(what)) as caught:
        Credentials.load().login(guarded.host)
    assert caught.value.exit_code == Exit.USAGE
    assert "secret" not in str(caught.value) + "".join(caught.value.details)


def test_tls_with_an_authority_of_ones_own(secured, trusted):
    with Registry(secured.host, NOBODY, QUICK) as registry:
        digest = image(registry, "secured/one")
        assert registry.resolve("secured/one", "one") == digest


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_tls_by_a_variable_and_without_any(secured, variable, monkeypatch, tmp_path):
    import pipeline.release.transport as transport

    monkeypatch.setattr(transport, "is_plain", lambda host: False)  # as every registry that is not on the loopback
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with Registry(secured.host, NOBODY, QUICK) as registry, pytest.raises(errors.TlsFailed) as caught:
        registry.tags("any")
    assert "certs.d" in caught.value.hint and caught.value.exit_code == Exit.PUBLISH
    monkeypatch.setenv(variable, str(secured.ca))
    with Registry(secured.host, NOBODY, QUICK) as registry:
        assert registry.tags("any") == ()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(errors.CertificatesUnreadable):
        Registry(secured.host, NOBODY, QUICK)


def test_plain_http_where_tls_is_awaited_says_so(plain, monkeypatch):
    import pipeline.release.transport as transport

    monkeypatch.setattr(transport, "is_plain", lambda host: False)
    with Registry(plain.host, NOBODY, QUICK) as registry, pytest.raises(errors.TlsFailed) as caught:
        registry.tags("any")
    assert "does not speak TLS" in caught.value.message and "certs.d" not in caught.value.hint


FAULTS = [
    ({"status": 500}, errors.RegistryBroken),
    ({"status": 503}, errors.RegistryBroken),
    ({"status": 429, "headers": {"Retry-After": "0"}}, errors.TooManyRequests),
    ({"drop": "now"}, errors.RegistrySilent),
    ({"drop": "request", "method": "PUT"}, errors.RegistrySilent),
    ({"wait": 5.0, "method": "HEAD"}, errors.RegistrySilent),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_what_passes_is_tried_again_and_what_stays_ends_with_8(fault, kind, faulty):
    path = "uploads" if fault.get("drop") == "request" else "."
    passing = faulty.fail(**fault, path=path, times=2)
    with Registry(faulty.host, NOBODY, SLOW if "wait" in fault else QUICK) as registry:
        content = os.urandom(200_000)
        made = registry.put_blob("faulty/one", content)
        assert passing.hits == 2 and registry.blob("faulty/one", made.digest) == content
        staying = faulty.fail(**fault, path=path)
        with pytest.raises(kind) as caught:
            registry.put_blob("faulty/one", os.urandom(200_000))
        assert staying.hits == QUICK.tries and caught.value.exit_code == Exit.PUBLISH and caught.value.hint


REFUSALS = [
    ({"status": 507}, errors.RegistryFull),
    ({"status": 413}, errors.RegistryFull),
    ({"status": 403, "code": "DENIED", "message": "quota of the project is used up"}, errors.RegistryFull),
    ({"status": 403, "code": "DENIED", "message": "requested access to the resource is denied"}, errors.Refused),
    ({"status": 405, "code": "UNSUPPORTED", "message": "read only"}, errors.Refused),
    ({"status": 400, "code": "DIGEST_INVALID", "message": "provided digest did not match"}, errors.DigestMismatch),
    ({"status": 404, "code": "NAME_UNKNOWN"}, errors.NotInRegistry),
    ({"status": 401}, errors.Unauthorized),
]


@pytest.mark.parametrize(("fault", "kind"), REFUSALS)
def test_a_refusal_is_final(fault, kind, faulty):
    refusing = faulty.fail(**fault, method="PUT|POST")
    with Registry(faulty.host, NOBODY, QUICK) as registry, pytest.raises(kind) as caught:
        registry.put_blob("refused/one", os.urandom(1000))
    assert refusing.hits == 1 and caught.value.hint
    assert str(fault["status"]) in caught.value.message and caught.value.exit_code == Exit.PUBLISH


@pytest.mark.parametrize(
    "message", ["write /data: no space left on device", "{'Enclosed': {'Op': 'write', 'Err': 28}}"]
)
def test_a_full_disk_says_so_after_its_tries(message, faulty):
    faulty.fail(status=500, method="PUT", message=message)
    with Registry(faulty.host, NOBODY, QUICK) as registry, pytest.raises(errors.RegistryFull):
        registry.put_blob("full/one", os.urandom(1000))


def test_retry_after_is_honoured_up_to_its_cap(faulty):
    faulty.fail(status=429, headers={"Retry-After": "1"}, times=1)
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        registry.tags("polite")
        assert faulty.seen[-1].at - faulty.seen[0].at >= 0.95
        faulty.fail(status=429, headers={"Retry-After": "3600"})
        before = len(faulty.seen)
        with pytest.raises(errors.TooManyRequests, match="3600 s"):
            registry.tags("polite")
        assert len(faulty.seen) == before + 1
        faulty.faults[-1].headers = {"Retry-After": "soon"}
        with pytest.raises(errors.TooManyRequests):
            registry.tags("polite")


def test_a_blob_that_breaks_off_is_read_again_and_a_changed_one_is_refused(faulty, plain, tmp_path):
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        content = os.urandom(3_000_000)
        made = registry.put_blob("broken/one", content)
        dropped = faulty.fail(method="GET", path="blobs", drop="response", times=2)
        assert registry.save_blob("broken/one", made.digest, tmp_path / "whole").read_bytes() == content
        assert dropped.hits == 2
        faulty.fail(method="GET", path="blobs", drop="response")
        with pytest.raises((errors.RegistrySilent, errors.BlobBroken)) as caught:
            registry.save_blob("broken/one", made.digest, tmp_path / "half")
        assert caught.value.exit_code == Exit.PUBLISH
        faulty.faults[-1] = changed = type(dropped)(method="GET", change=True)
        with pytest.raises(errors.DigestMismatch):
            registry.save_blob("broken/one", made.digest, tmp_path / "half")
        image(registry, "broken/one")
        with pytest.raises(errors.DigestMismatch):
            registry.manifest("broken/one", "one")
        assert changed.hits == 2 and [p.name for p in tmp_path.iterdir()] == ["whole"]


def test_nobody_listens_and_something_else_does(tmp_path):
    with Registry(f"127.0.0.1:{free_port()}", NOBODY, QUICK) as registry, pytest.raises(errors.RegistrySilent):
        registry.tags("any")


def test_a_registry_that_sends_byte_by_byte_is_given_up(faulty):
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        image(registry, "drips")
    with Registry(faulty.host, NOBODY, replace(QUICK, whole=1.0)) as registry:
        faulty.fail(method="GET", drip=0.5)  # some three minutes for the whole
        began = time.monotonic()
        with pytest.raises(errors.RegistrySilent, match="longer than 1 s"):
            registry.manifest("drips", "one")
        assert time.monotonic() - began < 60


def test_what_a_refusal_says_is_not_waited_for(faulty, monkeypatch):
    monkeypatch.setattr(answers, "_LONGEST", 0.5)
    faulty.fail(path="blobs", drip=1.0)
    began = time.monotonic()
    with Registry(faulty.host, NOBODY, QUICK) as registry, pytest.raises(errors.NotInRegistry, match="answered 404"):
        registry.blob("slow/one", "sha256:" + "0" * 64)
    assert time.monotonic() - began < 60


def test_a_registry_that_one_may_only_read_is_noticed_without_pushing(programs, faulty, tmp_path):
    reading = {"storage": {"filesystem": {"rootdirectory": str(tmp_path / "data")},
                           "maintenance": {"readonly": {"enabled": True}}}}  # fmt: skip
    refused = pytest.raises(errors.Refused, match="may be pushed to")
    with running(tmp_path, reading) as one, Registry(one.host, NOBODY, QUICK) as registry, refused:
        registry.check_writable("some/where")
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        registry.check_writable("probe/fine")
        assert [(seen.method, seen.size) for seen in faulty.seen] == [("POST", 0), ("DELETE", 0)]
        assert registry.tags("probe/fine") == ()
        faulty.fail(method="DELETE", status=500)  # then the registry forgets the upload in time
        registry.check_writable("probe/fine")
        faulty.fail(method="POST", status=507)
        with pytest.raises(errors.RegistryFull):
            registry.check_writable("probe/fine")
