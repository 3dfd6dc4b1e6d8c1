"""A built image on its way to its tags through a real registry: what travels, in which order, and what happens when that
fails. BuildKit's part is played by a layout of the same shape; the whole of it runs in tests/docker/test_release.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from release_registries import NOBODY, QUICK
from release_samples import SampleImage, release

from pipeline.contract.errors import PublishError
from pipeline.registry.client import Registry
from pipeline.registry.errors import RegistryError
from pipeline.registry.reference import Reference
from pipeline.release import cosign
from pipeline.release.cosign import Signer, Verifier
from pipeline.release.images import read_image
from pipeline.release.publish import exports
from pipeline.release.verify import examine

TAG = "tiny-tp2"


@pytest.fixture
def place(faulty, request):
    """A registry behind the proxy, and a repository of this test alone."""
    with Registry(faulty.host, NOBODY, QUICK) as registry:
        yield registry, f"publish/{abs(hash(request.node.name)):x}"


def puts(proxy, since=0):
    return [one.path for one in proxy.seen[since:] if one.method == "PUT" and "/manifests/" in one.path]


def sent(proxy, since=0):
    return [one for one in proxy.seen[since:] if one.method in ("PUT", "POST", "PATCH") and one.size]


def test_the_tag_is_the_last_thing_that_is_written(place, faulty, tmp_path, keys):
    registry, repository = place
    done = release(registry, repository, SampleImage(tmp_path), tag=TAG, signer=Signer(str(keys[0])))
    assert done.new and registry.resolve(repository, TAG) == done.digest
    order = [path.rpartition("/")[2] for path in puts(faulty)]
    assert order[-2:] == ["inputs-" + "1" * 64, TAG] and order.count(TAG) == 1
    assert any(path.endswith(".sig") for path in order[:-2]), "it is signed before"
    found = examine(registry, Reference(registry.name, repository, TAG), Verifier(str(keys[1])))
    assert {answer.state for answer in found.answers} == {"ok"}, found.answers


def test_what_is_there_is_not_pushed_again(place, faulty, tmp_path):
    registry, repository = place
    image = SampleImage(tmp_path)
    first = release(registry, repository, image, tag=TAG)
    began = len(faulty.seen)
    again = release(registry, repository, image, tag=TAG)
    assert (again.digest, again.new) == (first.digest, False) and image.exports == 1
    assert sent(faulty, began) == []


def test_of_another_image_its_cache_and_what_names_it_alone_travel(place, faulty, tmp_path):
    registry, repository = place
    release(registry, repository, SampleImage(tmp_path), tag=TAG)
    began = len(faulty.seen)
    image = SampleImage(tmp_path, tactic=5)
    release(registry, repository, image, tag="other", inputs="2" * 64)
    sizes = [one.size for one in sent(faulty, began)]
    assert len(image.layers[0]) not in sizes and len(image.layers[1]) in sizes


def test_a_tag_is_never_moved(place, faulty, tmp_path):
    registry, repository = place
    first = release(registry, repository, SampleImage(tmp_path), tag=TAG)
    began = len(faulty.seen)
    with pytest.raises(PublishError, match="a tag is never moved"):
        release(registry, repository, SampleImage(tmp_path, tactic=5), tag=TAG, inputs="2" * 64)
    assert sent(faulty, began) == [] and registry.resolve(repository, TAG) == first.digest


def test_a_tag_that_somebody_gave_meanwhile_is_not_moved(place, tmp_path):
    registry, repository = place
    other = release(registry, repository, SampleImage(tmp_path, tactic=5), inputs="2" * 64)
    image = SampleImage(tmp_path)
    real = image.run

    def meanwhile(words):
        registry.put_manifest(repository, registry.manifest(repository, other.digest), TAG)
        return real(words)

    image.run = meanwhile
    with pytest.raises(PublishError, match="never moved"):
        release(registry, repository, image, tag=TAG)
    assert registry.resolve(repository, TAG) == other.digest


def test_the_same_image_of_another_host_keeps_its_tag(place, tmp_path):
    registry, repository = place
    first = release(registry, repository, SampleImage(tmp_path), tag=TAG)
    image = SampleImage(tmp_path / "second")
    again = release(registry, repository, image, tag=TAG)
    assert again.digest == first.digest and image.exports == 0


def test_what_a_key_has_not_signed_it_does_not_vouch_for(place, tmp_path, keys):
    """Whoever may push can put the same config under the tag, beside layers or a provenance of their own."""
    registry, repository = place
    first = release(registry, repository, SampleImage(tmp_path), tag=TAG)
    signer = Signer(str(keys[0]))
    with pytest.raises(PublishError, match="this key has not signed"):
        release(registry, repository, SampleImage(tmp_path / "second"), tag=TAG, signer=signer)
    assert not cosign.has_signature(registry, Reference(registry.name, repository, TAG).at(first.digest))
    again = release(registry, repository, SampleImage(tmp_path), tag=TAG, signer=signer)  # pushed by this host
    assert again.digest == first.digest and cosign.is_signed_by(
        registry, Reference(registry.name, repository, TAG).at(first.digest), signer
    )


def test_of_two_hosts_that_release_the_same_at_once_one_wins_and_the_other_sees_it(place, tmp_path):
    registry, repository = place
    ours, theirs = SampleImage(tmp_path), SampleImage(tmp_path / "second")
    real = ours.run

    def meanwhile(words):
        ours.theirs = release(registry, repository, theirs, tag=TAG)
        return real(words)

    ours.run = meanwhile
    done = release(registry, repository, ours, tag=TAG)
    assert ours.exports == theirs.exports == 1, "both had begun to push"
    assert done.digest == ours.theirs.digest == registry.resolve(repository, TAG)
    assert registry.resolve(repository, "inputs-" + "1" * 64) == done.digest


@pytest.mark.parametrize("where", ["/blobs/uploads/.*", "/manifests/sha256:", "/manifests/sha256-", "/manifests/inputs-", f"/manifests/{TAG}"])  # fmt: skip
def test_a_registry_that_breaks_leaves_no_tag_and_the_next_run_goes_on(place, faulty, tmp_path, where):
    registry, repository = place
    image = SampleImage(tmp_path)
    faulty.fail(method="PUT", path=where, status=500)
    with pytest.raises(RegistryError):
        release(registry, repository, image, tag=TAG)
    assert registry.resolve(repository, TAG) is None
    faulty.faults.clear()
    began = len(faulty.seen)
    done = release(registry, repository, image, tag=TAG)
    assert registry.resolve(repository, TAG) == done.digest
    if "sha256:" not in where and "blobs" not in where:
        assert image.exports == 1, "what was pushed is not exported again"
        assert not [one for one in sent(faulty, began) if one.size == len(image.layers[0])]


def test_what_is_exported_must_be_what_was_verified(place, faulty, tmp_path):
    registry, repository = place
    image, other = SampleImage(tmp_path), SampleImage(tmp_path, tactic=5)
    image.export = other.export
    with pytest.raises(PublishError, match="not the image that was verified"):
        release(registry, repository, image, tag=TAG)
    image.export = lambda *_: "sha256:" + "0" * 64
    with pytest.raises(PublishError, match="cannot be read"):
        release(registry, repository, image, tag=TAG)
    assert sent(faulty) == []


def test_annotations_and_provenance_are_read_back(plain, tmp_path):
    class Dropping(Registry):
        """A registry, or a proxy before it, that drops annotations without a word."""

        def manifest(self, repository, reference):
            found = super().manifest(repository, reference)
            value = {name: part for name, part in found.json().items() if name != "annotations"} if found else None
            return replace(found, body=json.dumps(value).encode()) if found else None

    with Dropping(plain.host, NOBODY, QUICK) as registry, pytest.raises(PublishError, match="came back without"):
        release(registry, "publish/dropped", SampleImage(tmp_path), tag=TAG)
    with Registry(plain.host, NOBODY, QUICK) as registry, pytest.raises(PublishError, match="without provenance"):
        release(registry, "publish/bare", SampleImage(tmp_path, without=("provenance",)), tag=TAG)
    with Registry(plain.host, NOBODY, QUICK) as registry:
        assert registry.resolve("publish/dropped", TAG) is registry.resolve("publish/bare", TAG) is None


def test_the_sbom_names_the_images_own_digest(place, tmp_path):
    registry, repository = place
    done = release(registry, repository, SampleImage(tmp_path))
    image = read_image(registry, repository, done.digest).images[0]
    (listed,) = registry.referrers(repository, image.digest, "application/vnd.cyclonedx+json")
    layer = registry.manifest(repository, listed.digest).entries("layers")[0]
    bom = json.loads(registry.blob(repository, layer.digest))
    assert bom["metadata"]["component"]["version"] == image.digest
    assert [one["purl"] for one in bom["components"]] == ["pkg:pypi/torch@2.13.0"]


def test_exports_of_killed_runs_are_removed_and_those_of_others_never(tmp_path: Path) -> None:
    """A run in another container has another /proc: its lock tells that it lives, and no process number does."""
    gone = tmp_path / "exports" / "run-999999999-abc"
    gone.mkdir(parents=True)
    code = "import sys; from pathlib import Path; from pipeline.release.publish import exports\n"
    code += "with exports(Path(sys.argv[1])) as made: print(made, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path)]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode == 0:
        words = ["unshare", "--pid", "--fork", *words]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        theirs = Path(other.stdout.readline().strip())
        with exports(tmp_path):
            assert theirs.is_dir() and not gone.exists()
        other.stdin.close()
    with exports(tmp_path) as first, exports(tmp_path) as second:
        assert first != second
    assert list((tmp_path / "exports").iterdir()) == []
