"""`attestation verify`, attachments and signatures, with the real cosign, oras and skopeo as the other side."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import release_samples as samples
from release_registries import NOBODY, PASSWORD, QUICK, USER, auth_of, command, watched
from release_samples import SampleImage, release

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import Exit, PublishError, UsageError
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import EMPTY, Descriptor, Manifest
from pipeline.registry.reference import Reference
from pipeline.release import attachments, cosign, sbom
from pipeline.release.attachments import AUTOTUNE, AUTOTUNE_GZIP, CYCLONEDX, VERDICT, VERDICT_JSON
from pipeline.release.cosign import Signer, Verifier
from pipeline.release.images import read_image
from pipeline.release.verify import examine


def states(found):
    return {answer.name: (answer.state, answer.what) for answer in found.answers}


def put(registry, repository, image, *, signer=None, digest=""):
    """Push an image alone, without attachments; its reference."""
    layout = image.folder / "bare"
    top = image.export(layout, "bare", image.annotations(), "")
    for path in (layout / "blobs" / "sha256").iterdir():
        registry.put_blob(repository, path)
    for manifest in sorted((layout / "blobs" / "sha256").iterdir(), key=lambda path: f"sha256:{path.name}" == top):
        body = manifest.read_bytes()
        if b'"schemaVersion"' in body[:40]:
            registry.put_manifest(repository, Manifest.of(body, json.loads(body)["mediaType"]))
    return Reference(registry.name, repository, digest=top)


def attach(registry, reference, *items):
    image = read_image(registry, reference.repository, reference.digest).images[0]
    return attachments.attach(registry, reference.repository, image.manifest.descriptor(), items)[0]


def test_released_verified_and_read_by_others(plain, keys, pipeline, tmp_path):
    private, public = keys
    image = SampleImage(tmp_path)
    with Registry(plain.host, NOBODY, QUICK) as registry:
        digest = release(registry, "trust/whole", image, signer=Signer(str(private)), tag="one").digest
        before = plain.blobs()
        assert not release(registry, "trust/whole", image, signer=Signer(str(private)), tag="one").new
        assert plain.blobs() == before, "a second run adds nothing"
        inner = read_image(registry, "trust/whole", digest).images[0].digest
    name = f"{plain.host}/trust/whole@{digest}"
    done = pipeline("attestation", "verify", f"{plain.host}/trust/whole:one", "--key", public, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert {one["state"] for one in told["checks"]} == {"ok"} and told["result"] == "pass"
    assert {one["name"] for one in told["checks"]} == {
        "signature", "provenance", "sbom", "autotune", "verdict", "annotations",
    }  # fmt: skip
    done = pipeline("attestation", "verify", name)  # no key: said, and not taken for checked
    assert done.returncode == Exit.PUBLISH and "unchecked signature" in done.stdout
    command("cosign", "verify", "--key", public, "--insecure-ignore-tlog=true", name)
    found = json.loads(command("oras", "discover", "--plain-http", "--format", "json", f"{plain.host}/trust/whole@{inner}"))  # fmt: skip
    kinds = {m["artifactType"]: m for m in found["manifests"]}
    assert set(kinds) == {AUTOTUNE, VERDICT, CYCLONEDX}
    command("oras", "pull", "--plain-http", "-o", tmp_path / "pulled", kinds[AUTOTUNE]["reference"])
    assert gzip.decompress((tmp_path / "pulled" / "manifest.json.gz").read_bytes()) == image.manifests[0]
    raw = samples.inspect(f"{plain.host}/trust/whole@{kinds[VERDICT]['digest']}")
    assert raw["subject"]["digest"] == inner and raw["config"]["mediaType"] == EMPTY


def test_everything_that_is_missing_is_said_at_once(plain, keys, pipeline, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/bare", SampleImage(tmp_path, without=("annotations", "provenance")))
    done = pipeline("attestation", "verify", name, "--key", keys[1], "--json")
    assert done.returncode == Exit.PUBLISH and "6 of 6" in done.stderr
    assert {one["state"] for one in json.loads(done.stdout)["checks"]} == {"missing"}


def test_a_verdict_that_does_not_fit_is_wrong_and_does_a_right_one_no_harm(plain, tmp_path):
    image = SampleImage(tmp_path)
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/verdict", image)
        attach(registry, name, attachments.verdict(replace(image.verdict, level="static")))
        assert states(examine(registry, name))["verdict"] == ("wrong", f"not replayed: {image.verdict.key}")
        attach(registry, name, attachments.verdict(image.verdict))
        assert states(examine(registry, name))["verdict"][0] == "ok"


def test_what_others_attached_or_signed_does_not_count(plain, keys, other_keys, tmp_path):
    """Whoever may push can attach: only what the key signed proves anything."""
    image = SampleImage(tmp_path, subject="sha256:" + "0" * 64)
    with Registry(plain.host, NOBODY, QUICK) as registry:
        digest = release(registry, "trust/others", image, signer=Signer(str(other_keys[0]))).digest
        found = states(examine(registry, Reference(plain.host, "trust/others", digest=digest), Verifier(str(keys[1]))))
    assert found["signature"][0] == found["verdict"][0] == found["sbom"][0] == "wrong"
    assert found["provenance"] == ("wrong", "its subject is another image")
    assert found["autotune"][0] == "ok", "the image's label names it, which the image's signature covers"


def test_what_was_moved_here_from_another_image_does_not_count(plain, keys, tmp_path):
    """Signed by the key, and of another image: the list of an old registry is a tag that anyone who may push writes."""
    signer = Signer(str(keys[0]))
    with Registry(plain.host, NOBODY, QUICK) as registry:
        here = put(registry, "trust/moved", SampleImage(tmp_path))
        cosign.sign(registry, here, signer)
        other = release(registry, "trust/moved", SampleImage(tmp_path, tactic=5), signer=signer).digest
        mine, theirs = (read_image(registry, "trust/moved", d).images[0].digest for d in (here.digest, other))
        registry._add_to_list("trust/moved", mine, registry.referrers("trust/moved", theirs))
        found = states(examine(registry, here, Verifier(str(keys[1]))))
    assert found["signature"][0] == "ok"
    for name in ("sbom", "verdict"):
        assert found[name][0] == "wrong" and f"it is of {theirs}" in found[name][1]


def test_junk_beside_what_proves_an_image_spoils_nothing(plain, keys, pipeline, tmp_path):
    """Anyone who may push can attach junk: it is refused by itself, and the signed ones count."""
    image, signer = SampleImage(tmp_path), Signer(str(keys[0]))
    with Registry(plain.host, NOBODY, QUICK) as registry:
        bare = put(registry, "trust/junk", image)
        junk = [
            attachments.Attachment(kind, kind, content, "junk")
            for kind in (VERDICT, CYCLONEDX, AUTOTUNE)
            for content in (b"\xff", b"[]", b"[" * 100_000)
        ]
        for content in (b"\xff", gzip.compress(image.manifests[0])[:-9], gzip.compress(b"{" * (65 << 20), 1)):
            junk.append(attachments.Attachment(AUTOTUNE, AUTOTUNE_GZIP, content, "junk.gz"))
        attach(registry, bare, *junk)
        found = states(examine(registry, bare))
        assert found["verdict"][0] == found["sbom"][0] == "wrong" and found["autotune"][0] == "missing"
        digest = release(registry, "trust/junk", image, signer=signer).digest
    done = pipeline("attestation", "verify", f"{plain.host}/trust/junk@{digest}", "--key", keys[1])
    assert done.returncode == 0, done.stdout


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


class Hostile(Registry):
    """The registry, with one attachment that it gives out without a push. What else it has is read from it once."""

    def __init__(self, *given):
        super().__init__(*given)
        self.attachment, self.subject = attachments.Attachment("", "", b"", ""), ""
        self.honest = {}

    def lie(self):
        layer = Descriptor.of(self.attachment.content, self.attachment.media_type).to_json()
        value = {"artifactType": self.attachment.artifact_type, "layers": [layer], "subject": {"digest": self.subject}}
        return Manifest.of(json.dumps(value).encode())

    def referrers(self, repository, digest, artifact_type=None):
        found = self.lie().descriptor()
        return (found,) if artifact_type in (None, found.artifact_type) else ()

    def manifest(self, repository, reference):
        if reference == self.lie().digest:
            return self.lie()
        if reference not in self.honest:
            self.honest[reference] = super().manifest(repository, reference)
        return self.honest[reference]

    def blob(self, repository, digest, *, limit=1 << 26):
        content = self.attachment.content
        if digest == f"sha256:{sha256_bytes(content)}":
            return content
        if digest not in self.honest:
            self.honest[digest] = super().blob(repository, digest, limit=limit)
        return self.honest[digest]


@pytest.mark.parametrize("kind", ["verdict", "autotune", "sbom"])
def test_what_an_attacker_pushes_is_an_answer_and_no_traceback(kind, plain, tmp_path):
    """Every field of every attachment with every kind of value, and what is no JSON at all."""
    values = [5, None, [], {}, [[]], "", "x" * 1000, 1e308, True, [5], {"a": []}]
    image = SampleImage(tmp_path)
    with Hostile(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, f"trust/hostile-{kind}", image)
        registry.subject = read_image(registry, name.repository, name.digest).images[0].digest
        sbom = {"metadata": {"component": {"version": registry.subject}}, "components": [{"name": "torch"}]}
        whole = {
            "verdict": image.verdict.to_json(), "autotune": json.loads(image.manifests[0]), "sbom": sbom,
        }[kind]  # fmt: skip
        contents = [json.dumps({**whole, field: new}).encode() for field in whole for new in values]
        contents += [b"", b"\xff", b"[" * 100_000, DEEP, b"9" * 10_000, b'{"schema": NaN}', b'"text"', b"null"]
        made = {"verdict": (VERDICT, VERDICT_JSON), "sbom": (CYCLONEDX,) * 2,
                "autotune": (AUTOTUNE, "application/json")}[kind]  # fmt: skip
        bound = ("key", "result", "level", "identity", "cache_diff_id", "manifest_sha256")
        for content in contents:
            registry.attachment = attachments.Attachment(*made, content, "hostile")
            found = states(examine(registry, name))
            assert found["provenance"][0] == "ok"
            try:
                said = json.loads(content)
            except (ValueError, RecursionError):
                said = None
            if kind == "verdict" and not (isinstance(said, dict) and all(said.get(n) == whole[n] for n in bound)):
                assert found["verdict"][0] == "wrong", content[:200]


@pytest.mark.parametrize("change", [
    {"config": 5}, {"layers": 5}, {"annotations": 5}, {"manifests": 5}, {"manifests": [{"digest": 5}]}, {"layers": [5]},
    {"config": {"mediaType": "x", "digest": "sha256:" + "0" * 64, "size": 1e400}}, {"manifests": []},
])  # fmt: skip
def test_a_hostile_image_is_one_error_of_publishing(change, plain, tmp_path, monkeypatch):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/hostile-image", SampleImage(tmp_path))
        real = registry.manifest

        def lie(repository, digest):
            found = real(repository, digest)
            return replace(found, body=json.dumps({**found.json(), **change}).encode()) if found else None

        monkeypatch.setattr(registry, "manifest", lie)
        try:
            found = examine(registry, name)
        except PublishError:
            return
    assert not found.complete


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (("127.0.0.1:1/none/here:x",), Exit.PUBLISH, "Connection refused"),
        (("HOST/none/here:x",), Exit.PUBLISH, "there is no"),
        (("tuned/tiny:x",), Exit.USAGE, "names no registry"),
        (("HOST/none:x", "--key", "/none/cosign.pub"), Exit.USAGE, "no key file"),
        (("HOST/none:x", "--key", "env://UNSET_FOR_SURE"), Exit.USAGE, "is not set"),
        (("HOST/none:x", "--identity", "me@example.com"), Exit.USAGE, "needs --issuer"),
        (("HOST/none:x", "--issuer", "https://issuer.example.com"), Exit.USAGE, "needs --identity"),
    ],
)
def test_bad_input_is_one_line(words, code, what, plain, keys, pipeline):
    spelled = (word.replace("HOST", plain.host).replace("PUBLIC", str(keys[1])) for word in words)
    done = pipeline("attestation", "verify", *spelled)
    assert done.returncode == code and what in done.stderr and "hint: " in done.stderr, done.stderr


def test_signing_says_what_is_wrong(plain, keys, tmp_path, monkeypatch):
    private, public = keys
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/signing", SampleImage(tmp_path))
        monkeypatch.setenv("COSIGN_PASSWORD", "not the password")
        with pytest.raises(PublishError) as caught:
            cosign.sign(registry, name, Signer(str(private)))
        with pytest.raises(UsageError, match="cosign cannot use") as early:
            Signer(str(private)).check()
        with pytest.raises(UsageError, match="unrecognized scheme"):  # before anything is built
            Signer("nokms://key").check()
        assert "not the password" not in str(early.value) + str(caught.value) + "".join(caught.value.details)
        assert not cosign.has_signature(registry, name)
        monkeypatch.delenv("COSIGN_PASSWORD")
        with pytest.raises(UsageError, match="COSIGN_PASSWORD is not set"):
            Signer(str(private)).check()
        monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
        monkeypatch.setenv("SIGNING_KEY", private.read_text())
        assert cosign.sign(registry, name, Signer("env://SIGNING_KEY"))
        assert not cosign.sign(registry, name, Signer("env://SIGNING_KEY"))
        assert cosign.verify(registry, name, Verifier(str(public))) == ""
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(PublishError, match="not installed") as missing:
            Signer("env://SIGNING_KEY").check()
        assert "apt-get install cosign" in missing.value.hint


@pytest.fixture
def called(tmp_path, monkeypatch):
    """A stand-in for cosign 3 that writes down how it is called; the file that it writes."""
    log, program = tmp_path / "log", tmp_path / "cosign"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'case "$*" in *--help*) echo "--use-signing-config --new-bundle-format";; esac\n'
        f'case "$1" in sign) echo "token=$CLOUD_TOKEN" >> {log};; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cosign._options.cache_clear()
    yield log
    cosign._options.cache_clear()


@pytest.mark.parametrize("key", ["awskms:///alias/release", "gcpkms://projects/p/x", "pkcs11:token=a", "keyless"])
def test_other_keys_are_left_to_cosign(key, plain, called, tmp_path, monkeypatch):
    """Addresses of a KMS and keyless signing: handed on as they are, with the variables that a cloud's client reads."""
    monkeypatch.setenv("CLOUD_TOKEN", "a-token")
    monkeypatch.delenv("COSIGN_PASSWORD", raising=False)
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/kms", SampleImage(tmp_path))
        signer = Signer(key)
        signer.check()
        assert cosign.sign(registry, name, signer)
    told = called.read_text()
    more = "" if key == "keyless" else f" --key={key} --tlog-upload=false --use-signing-config=false"
    assert f"sign --yes{more}" in told
    assert "token=a-token" in told and "a-token" not in told.replace("token=a-token", "")


def test_a_bundle_of_cosign_3_is_found_and_checked_as_one(plain, called, tmp_path):
    """cosign 3 keeps signatures as referrers. (Such a cosign has not run here: a stand-in shows how it is called.)"""
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/bundle", SampleImage(tmp_path))
        verifier = Verifier(identity="me@example.com", issuer="https://issuer.example.com")
        assert cosign.verify(registry, name, verifier) == "it has no signature"
        top = registry.manifest(name.repository, name.digest)
        item = attachments.Attachment(cosign.BUNDLE, cosign.BUNDLE, b"{}", "bundle")
        attachments.attach(registry, name.repository, top.descriptor(), [item])
        assert cosign.has_signature(registry, name) and cosign.verify(registry, name, verifier) == ""
    told = called.read_text()
    assert "--certificate-identity=me@example.com --certificate-oidc-issuer=https://issuer.example.com" in told
    assert "--new-bundle-format=true" in told


def test_no_secret_is_seen_by_anyone(guarded, docker_home, keys, tmp_path, monkeypatch):
    """Passwords and keys: in no argument of any process, no log, no blob of the registry."""
    private, public = keys
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {guarded.host: auth_of(USER, PASSWORD)}}))
    key = private.read_text()
    secrets = [PASSWORD, auth_of(USER, PASSWORD)["auth"], samples.KEY_PASSWORD]
    secrets += [line for line in key.splitlines() if len(line) > 40]
    monkeypatch.setenv("SIGNING_KEY", key)
    image = SampleImage(tmp_path)
    with Registry(guarded.host, policy=QUICK) as registry, watched() as seen:
        digest = release(registry, "trust/secret", image, signer=Signer("env://SIGNING_KEY")).digest
        name = Reference(guarded.host, "trust/secret", digest=digest)
        assert cosign.verify(registry, name, Verifier(str(public))) == ""
    told = "\n".join(seen)
    assert "cosign" in told and "--key=env://SIGNING_KEY" in told, "the watcher saw nothing"
    files = [image.log, guarded.log, *guarded.data.glob("docker/registry/v2/blobs/sha256/*/*/data")]
    assert len(files) > 8 and image.log.stat().st_size > 0
    for path in files:
        told += path.read_bytes().decode(errors="replace")
    assert [secret for secret in secrets if secret in told] == []


def test_a_client_certificate_reaches_cosign(tmp_path, monkeypatch, called, plain):
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    place = tmp_path / "config" / "docker" / "certs.d" / "registry.example.com"
    place.mkdir(parents=True)
    for name in ("client.cert", "client.key"):
        (place / name).write_text("x")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    subject = Reference("registry.example.com", "team/model", digest="sha256:" + "0" * 64)
    with Registry(plain.host, NOBODY, QUICK) as registry:
        assert cosign.sign(registry, subject, Signer("keyless"))
    options = f"--registry-client-cert={place}/client.cert --registry-client-key={place}/client.key"
    assert f"sign --yes {options} {subject}" in called.read_text()


def test_cosign_is_needed_only_for_signatures(plain, pipeline, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        name = put(registry, "trust/unsigned", SampleImage(tmp_path))
    done = pipeline("attestation", "verify", name, env={"PATH": str(tmp_path)})
    assert done.returncode == Exit.PUBLISH and "signature missing" in done.stderr


def test_an_sbom_is_the_same_each_time(tmp_path):
    status = (
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u1\n"
        "Description: GNU C Library\n more\n\nPackage: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    odd = {"name": "odd", "version": "1", "licence": "", "licence_name": "Anyone may use it", "summary": ""}
    listed = {"distributions": [samples.DISTRIBUTION, odd], "status": status, "release": 'ID=debian\nVERSION_ID="12"'}
    given = {"name": "tuned/tiny", "digest": "sha256:" + "1" * 64, "created": datetime(2026, 1, 1, tzinfo=UTC)}
    made = [sbom.make(sbom.installed(lambda _: json.dumps(listed), tmp_path), **given) for _ in range(2)]
    assert made[0] == made[1]
    told = json.loads(made[0])
    assert told["bomFormat"] == "CycloneDX" and told["specVersion"] == "1.6"
    assert {c["name"]: c["purl"] for c in told["components"]} == {
        "torch": "pkg:pypi/torch@2.13.0", "odd": "pkg:pypi/odd@1",
        "libc6": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12",
    }  # fmt: skip
    torch = next(c for c in told["components"] if c["name"] == "torch")
    assert torch["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    with pytest.raises(PublishError, match="did not list"):
        sbom.installed(lambda _: "no JSON", tmp_path)
