"""Attachments, signatures and `attest verify`, with the real cosign, oras and skopeo as the other side."""

from __future__ import annotations

import gzip
import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import release_samples as samples
from release_registries import NOBODY, PASSWORD, QUICK, USER, auth_of, command, watched

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import PublishError
from pipeline.contract.exits import Exit
from pipeline.contract.verdict import Verdict
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Descriptor, Manifest
from pipeline.registry.errors import RegistryError
from pipeline.release import attach, contents, faults, media, sbom, sign
from pipeline.release.examine import examine
from pipeline.release.seal import seal
from pipeline.release.sign import Signer

SBOM = sbom.make(
    contents.Contents((contents.Package("python", "torch", "2.13.0", licence="BSD-3-Clause", sha256="0" * 64),)),
    name="tuned/tiny", digest="sha256:" + "1" * 64, created=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip


@pytest.fixture
def keys(tmp_path, programs, monkeypatch):
    monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
    return samples.key_pair(tmp_path / "keys")


def everything(sample, *without):
    made = {
        "autotune": attach.autotune(sample.autotune),
        "verdict": attach.verdict(sample.verdict),
        "sbom": attach.sbom(SBOM),
    }
    return [one for name, one in made.items() if name not in without]


def states(done):
    told = json.loads(done.stdout)
    assert (told["result"] == "pass") == (done.returncode == 0)
    return {check["name"]: (check["state"], check["what"]) for check in told["checks"]}


def test_sealed_verified_and_read_by_others(plain, keys, pipeline, tmp_path):
    private, public = keys
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/whole", tmp_path)
        made = seal(registry, sample.reference, everything(sample), Signer(str(private)))
        before = plain.blobs()
        assert (
            seal(registry, sample.reference, everything(sample), Signer(str(private))) == made
        )  # goes on, adds nothing
        assert plain.blobs() == before
    done = pipeline("attestation", "verify", sample.reference, "--key", public, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    found = states(done)
    assert {state for state, _ in found.values()} == {"ok"} and set(found) == {
        "signature", "provenance", "sbom", "autotune", "verdict", "annotations",
    }  # fmt: skip
    done = pipeline("attestation", "verify", sample.reference)  # no key: said, and not taken for checked
    assert done.returncode == Exit.PUBLISH and "unchecked signature" in done.stdout
    name = str(sample.reference)
    command("cosign", "verify", "--key", public, "--insecure-ignore-tlog=true", name)
    told = json.loads(command("oras", "discover", "--plain-http", "--format", "json", name))
    kinds = {m["artifactType"]: m for m in told["manifests"]}
    assert set(kinds) == {media.AUTOTUNE, media.VERDICT, media.CYCLONEDX}
    pulled = tmp_path / "pulled"
    command("oras", "pull", "--plain-http", "-o", pulled, kinds[media.AUTOTUNE]["reference"])
    assert gzip.decompress((pulled / "manifest.json.gz").read_bytes()) == sample.autotune
    raw = samples.inspect(f"{plain.host}/trust/whole@{kinds[media.VERDICT]['digest']}")
    assert raw["subject"]["digest"] == sample.reference.digest and raw["config"]["mediaType"] == media.EMPTY


def test_everything_that_is_missing_is_said_at_once(plain, keys, pipeline, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/bare", tmp_path, annotate=False, provenance=None)
    done = pipeline("attestation", "verify", sample.reference, "--key", keys[1], "--json")
    assert done.returncode == Exit.PUBLISH and "6 of 6" in done.stderr
    assert {state for state, _ in states(done).values()} == {"missing"}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"config_digest": "sha256:" + "0" * 64}, "is of config"),
        ({"cache_diff_id": "sha256:" + "0" * 64}, "is of the cache layer"),
        ({"manifest_sha256": "0" * 64}, "other manifests"),
        ({"level": "static"}, "not replayed: 0.6"),
        ({"result": "fail", "findings": ("a miss",)}, "says fail"),
    ],
)
def test_a_verdict_that_does_not_fit_is_wrong(change, what, plain, pipeline, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, f"trust/verdict{abs(hash(what)) % 10**6}", tmp_path)
        seal(registry, sample.reference, [attach.verdict(replace(sample.verdict, **change))])
        state, said = states(pipeline("attestation", "verify", sample.reference, "--json"))["verdict"]
        assert state == "wrong" and what in said
        seal(registry, sample.reference, [attach.verdict(sample.verdict)])  # beside a right one it does no harm
        assert states(pipeline("attestation", "verify", sample.reference, "--json"))["verdict"][0] == "ok"


def test_what_others_attached_or_signed_does_not_count(plain, keys, pipeline, tmp_path):
    """Whoever may push can attach: only what the key signed proves anything."""
    _private, public = keys
    stranger, _ = samples.key_pair(tmp_path / "stranger")
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/others", tmp_path, provenance="sha256:" + "0" * 64)
        other = samples.push(registry, "trust/others", tmp_path, tactic=5)
        seal(registry, sample.reference, [attach.autotune(other.autotune)], Signer(str(stranger)))
        subject = registry.manifest("trust/others", sample.reference.digest).descriptor()
        attach.attach(registry, "trust/others", subject, everything(sample, "autotune"))
    found = states(pipeline("attestation", "verify", sample.reference, "--key", public, "--json"))
    assert found["signature"][0] == "wrong"
    assert found["provenance"] == ("wrong", "its subject is another image")
    assert found["verdict"][0] == found["sbom"][0] == "wrong" and "no signature" in found["verdict"][1]
    assert found["autotune"][0] == "missing"


def test_what_was_moved_here_from_another_image_does_not_count(plain, keys, pipeline, tmp_path):
    """Signed by the key, and of another image: the list of an old registry is a tag that anyone who may push writes."""
    private, public = keys
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/moved", tmp_path)
        other = samples.push(registry, "trust/moved", tmp_path, tactic=5)
        seal(registry, sample.reference, everything(sample, "sbom"), Signer(str(private)))
        seal(registry, other.reference, [attach.sbom(SBOM)], Signer(str(private)))
        for one in registry.referrers("trust/moved", other.reference.digest):
            registry._add_to_list("trust/moved", sample.reference.digest, [one])
    found = states(pipeline("attestation", "verify", sample.reference, "--key", public, "--json"))
    assert found["sbom"][0] == "wrong" and f"it is of {other.reference.digest}" in found["sbom"][1]
    assert {state for name, (state, _) in found.items() if name != "sbom"} == {"ok"}


def test_junk_among_the_attachments_is_an_answer_and_no_traceback(plain, pipeline, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/junk", tmp_path)
        junk = [
            attach.Attachment(kind, kind, content, "junk")
            for kind in (media.VERDICT, media.CYCLONEDX, media.AUTOTUNE)
            for content in (b"\xff", b"[]", b"[" * 100_000, b'{"schema": 1}')
        ]
        endless = gzip.compress(b"{" * (65 << 20), 1)
        for content in (b"\xff", gzip.compress(sample.autotune)[:-9], endless):
            junk.append(attach.Attachment(media.AUTOTUNE, media.AUTOTUNE_GZIP, content, "junk.gz"))
        seal(registry, sample.reference, junk)
    found = states(pipeline("attestation", "verify", sample.reference, "--json"))
    assert found["verdict"][0] == found["sbom"][0] == "wrong" and found["autotune"][0] == "missing"


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


def changed(value, name, new):
    return json.dumps({**value, name: new}).encode()


@pytest.mark.parametrize("kind", ["verdict", "autotune", "sbom"])
def test_what_an_attacker_pushes_is_an_answer_and_no_traceback(kind, plain, tmp_path):
    """Every field of every attachment with every kind of value, and what is no JSON at all."""
    values = [5, None, [], {}, [[]], "", "x" * 1000, 1e308, True, [5], {"a": []}]
    with Hostile(plain.host, NOBODY, QUICK) as registry:
        registry.attachment, registry.subject = attach.Attachment("", "", b"", ""), ""
        sample = samples.push(registry, f"trust/hostile-{kind}", tmp_path)
        registry.subject = sample.reference.digest
        right = {"verdict": attach.verdict(sample.verdict).content, "autotune": sample.autotune, "sbom": SBOM}[kind]
        whole = json.loads(right)
        contents = [changed(whole, name, new) for name in whole for new in values]
        contents += [b"", b"\xff", b"[" * 100_000, DEEP, b"9" * 10_000, b'{"schema": NaN}', b'"text"', b"null"]
        made = {"verdict": (media.VERDICT, media.VERDICT_JSON), "sbom": (media.CYCLONEDX,) * 2,
                "autotune": (media.AUTOTUNE, "application/json")}[kind]  # fmt: skip
        for content in contents:
            if json_or_none(content) == whole:
                continue
            registry.attachment = attach.Attachment(*made, content, "hostile")
            found = examine(registry, sample.reference)
            states = {answer.name: answer.state for answer in found.answers}
            assert states["provenance"] == "ok" and not found.complete
            said = json_or_none(content)
            bound = ("key", "result", "level", "config_digest", "cache_diff_id", "manifest_sha256")
            if kind == "verdict" and not (isinstance(said, dict) and all(said.get(n) == whole[n] for n in bound)):
                assert states["verdict"] == "wrong", content[:200]


class Hostile(Registry):
    """The registry, with one attachment that it gives out without a push."""

    attachment: attach.Attachment
    subject: str

    def lie(self):
        layer = Descriptor.of(self.attachment.content, self.attachment.media_type).to_json()
        value = {"artifactType": self.attachment.artifact_type, "layers": [layer], "subject": {"digest": self.subject}}
        return Manifest.of(json.dumps(value).encode())

    def referrers(self, repository, digest, artifact_type=None):
        found = self.lie().descriptor()
        return (found,) if artifact_type in (None, found.artifact_type) else ()

    def manifest(self, repository, reference):
        return self.lie() if reference == self.lie().digest else super().manifest(repository, reference)

    def blob(self, repository, digest, *, limit=1 << 26):
        content = self.attachment.content
        return content if digest == f"sha256:{sha256_bytes(content)}" else super().blob(repository, digest, limit=limit)


def json_or_none(content):
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("change", [
    {"config": 5}, {"layers": 5}, {"annotations": 5}, {"annotations": [1]}, {"config": {"digest": 5}}, {"layers": [5]},
    {"config": {"mediaType": "x", "digest": "sha256:" + "0" * 64, "size": 1e400}},
])  # fmt: skip
def test_a_hostile_image_is_one_error_of_publishing(change, plain, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/hostile-image", tmp_path)
        real = registry.manifest

        def lie(repository, digest):
            found = real(repository, digest)
            return replace(found, body=json.dumps({**found.json(), **change}).encode()) if found else None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "manifest", lie)
            try:
                found = examine(registry, sample.reference)
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
    ],
)
def test_bad_input_is_one_line(words, code, what, plain, pipeline):
    done = pipeline("attestation", "verify", *(word.replace("HOST", plain.host) for word in words))
    assert done.returncode == code and what in done.stderr and "hint: " in done.stderr, done.stderr


def test_annotations_that_do_not_come_back_fail(faulty, tmp_path):
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/lost", tmp_path)
        attach.check_annotations(registry, "trust/lost", sample.reference.digest, {})
        with pytest.raises(faults.AnnotationsLost, match="without a, c") as caught:
            attach.check_annotations(registry, "trust/lost", sample.reference.digest, {"a": "b", "c": "d"})
        assert caught.value.exit_code == Exit.PUBLISH and "containerd" in caught.value.hint


def test_signing_says_what_is_wrong(plain, keys, tmp_path, monkeypatch):
    private, public = keys
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/signing", tmp_path)
        monkeypatch.setenv("COSIGN_PASSWORD", "not the password")
        with pytest.raises(faults.SigningFailed) as caught:
            sign.sign(registry, sample.reference, Signer(str(private)))
        with pytest.raises(faults.KeyUnusable, match="cosign cannot use") as early:
            Signer(str(private)).open()
        assert "not the password" not in str(early.value)
        assert "not the password" not in str(caught.value) + "".join(caught.value.details)
        assert registry.resolve("trust/signing", sign.signature_tag(sample.reference.digest)) is None
        monkeypatch.delenv("COSIGN_PASSWORD")
        with pytest.raises(faults.KeyUnusable, match="COSIGN_PASSWORD is not set"):
            Signer(str(private)).check()
        monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
        monkeypatch.setenv("SIGNING_KEY", private.read_text())
        assert sign.sign(registry, sample.reference, Signer("env://SIGNING_KEY"))
        assert not sign.sign(registry, sample.reference, Signer("env://SIGNING_KEY"))
        assert sign.verify(registry, sample.reference, str(public)) == ""
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(faults.CosignMissing, match="not installed") as missing:
            Signer("env://SIGNING_KEY").check()
        assert "apt-get install cosign" in missing.value.hint


def test_a_repository_that_cosign_cannot_name_is_refused_first(plain, keys, pipeline, tmp_path):
    private, public = keys
    for repository, named in (("a", False), ("ab", True)):
        name = f"{plain.host}/{repository}@sha256:{'0' * 64}"
        words = ["cosign", "verify", "--insecure-ignore-tlog=true", "--allow-http-registry=true", "--key", public, name]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert ("could not parse reference" not in done.stderr) == named, done.stderr
    for words in (
        ("attestation", "verify", f"{plain.host}/a:x", "--key", public),
        ("cache", "push", tmp_path, f"oci://{plain.host}/a:x", "--sign", private),
        ("cache", "pull", f"oci://{plain.host}/a:x", "-o", tmp_path / "out", "--key", public),
        ("release", "tiny", "--registry", f"{plain.host}/a", "--sign", private),
    ):
        done = pipeline(*words)
        assert done.returncode == Exit.USAGE, words
        assert "cosign takes no repository of one letter" in done.stderr


def test_no_secret_is_seen_by_anyone(guarded, docker_home, keys, tmp_path, monkeypatch):
    """Passwords and keys: in no argument of any process, no log, no blob of the registry, and no other child's environment."""
    private, public = keys
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {guarded.host: auth_of(USER, PASSWORD)}}))
    auth = auth_of(USER, PASSWORD)["auth"]
    key = private.read_text()
    secrets = [PASSWORD, auth, samples.KEY_PASSWORD, *[line for line in key.splitlines() if len(line) > 40]]
    monkeypatch.setenv("SIGNING_KEY", key)
    log = tmp_path / "log"
    with Registry(guarded.host, policy=QUICK) as registry, watched() as seen:
        sample = samples.push(registry, "trust/secret", tmp_path)
        seal(registry, sample.reference, everything(sample), Signer("env://SIGNING_KEY"), log=log)
        assert sign.verify(registry, sample.reference, str(public)) == ""
    told = "\n".join(seen)
    assert "cosign" in told and "--key=env://SIGNING_KEY" in told, "the watcher saw nothing"
    files = [log, guarded.log, *guarded.data.glob("docker/registry/v2/blobs/sha256/*/*/data")]
    assert len(files) > 8 and log.stat().st_size > 0
    for secret in secrets:
        assert secret not in told
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert list(docker_home.iterdir()) == []


def test_a_registry_that_breaks_while_attaching_leaves_no_tag(faulty, keys, tmp_path):
    private, _ = keys
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/half", tmp_path)
        faulty.fail(method="PUT", path="manifests/sha256:", status=507)
        with pytest.raises(RegistryError):
            seal(registry, sample.reference, everything(sample), Signer(str(private)))
        assert [tag for tag in registry.tags("trust/half") if not tag.startswith("sha256-")] == []
        faulty.faults.clear()
        seal(registry, sample.reference, everything(sample), Signer(str(private)))
        assert len(registry.referrers("trust/half", sample.reference.digest)) == 3


def test_signing_behind_a_password_and_tls(logged_in, trusted, keys, pipeline, tmp_path):
    private, public = keys
    for host in (logged_in.host, trusted.host):
        with Registry(host, policy=QUICK) as registry:
            sample = samples.push(registry, "trust/guarded", tmp_path / host)
            seal(registry, sample.reference, everything(sample), Signer(str(private)))
        done = pipeline("attestation", "verify", sample.reference, "--key", public, "--json")
        assert done.returncode == 0, done.stderr + done.stdout


def test_an_sbom_is_the_same_each_time_and_valid():
    packages = (
        contents.Package("python", "torch", "2.13.0+cpu", licence="BSD-3-Clause", sha256="0" * 64),
        contents.Package("python", "odd", "1", licence_name="Anyone may use it"),
        *contents.debian(
            "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u1\n"
            "Description: GNU C Library\n more\n\nPackage: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
        ),
    )
    whole = contents.Contents(packages, {"ID": "debian", "VERSION_ID": "12"})
    given = {"name": "tuned/tiny", "digest": "sha256:" + "1" * 64, "created": datetime(2026, 1, 1, tzinfo=UTC)}
    once, again = sbom.make(whole, **given), sbom.make(whole, **given)
    assert once == again
    told = json.loads(once)
    assert told["bomFormat"] == "CycloneDX" and told["specVersion"] == "1.6"
    purls = {c["name"]: c["purl"] for c in told["components"]}
    assert purls == {
        "torch": "pkg:pypi/torch@2.13.0%2Bcpu", "odd": "pkg:pypi/odd@1",
        "libc6": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12",
    }  # fmt: skip
    torch = next(c for c in told["components"] if c["name"] == "torch")
    assert torch["licenses"] == [{"license": {"id": "BSD-3-Clause"}}] and torch["hashes"][0]["content"] == "0" * 64
    assert sbom.make(replace(whole, packages=packages[:1]), **given) != once


def test_cosign_is_needed_only_for_signatures(plain, pipeline, tmp_path):
    with Registry(plain.host, NOBODY, QUICK) as registry:
        sample = samples.push(registry, "trust/nocosign", tmp_path)
        seal(registry, sample.reference, everything(sample))
    found = states(pipeline("attestation", "verify", sample.reference, "--json", env={"PATH": str(tmp_path)}))
    assert found.pop("signature")[0] == "missing" and {state for state, _ in found.values()} == {"ok"}


def test_several_hosts_prove_an_image_of_several_gpus_together():
    from pipeline.registry.descriptors import Manifest
    from pipeline.release.fits import verdict_answer
    from pipeline.release.images import Image

    digest, layer = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    keys, shas = [f"0.6/90a/{c * 64}" for c in "ab"], ["c" * 64, "d" * 64]
    labels = {
        "io.github.tuned-image-pipeline.key": ",".join(keys),
        "io.github.tuned-image-pipeline.manifest": ",".join(shas),
    }
    config = {"config": {"Labels": labels}, "rootfs": {"diff_ids": [layer]}}
    image = Image(Manifest(b"{}", "", digest), digest, config, labels, ())
    base = Verdict(
        digest, layer, ",".join(reversed(shas)), ",".join(reversed(keys)), "H200", "static", "pass", {"keys": 2}
    )
    one, two = replace(base, replayed=(keys[0],)), replace(base, replayed=(keys[1],), device="H100")

    def judged(*verdicts):
        return verdict_answer([(json.dumps(v.to_json()).encode(), "") for v in verdicts], image)

    assert judged(one, two).state == judged(replace(base, level="replay")).state == "ok"
    assert judged(one, two).what == "replay pass on H200, H100"
    assert judged(one) == replace(judged(one, one), state="wrong") and keys[1] in judged(one).what
    assert judged(base).state == judged(one, replace(two, result="fail", findings=("a miss",))).state == "wrong"
    assert judged().state == "missing"
