"""A baked image on its way to its tag, through a real registry: what travels, in which order, and what happens when it breaks.

BuildKit's part is played by an OCI layout of the same shape; the whole of it runs in tests/docker/test_release.py.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import release_samples as samples
from cache_samples import write

from pipeline.contract.verdict import Verdict
from pipeline.image.caches import collect
from pipeline.registry.client import Registry
from pipeline.registry.credentials import Credentials
from pipeline.registry.descriptors import Manifest
from pipeline.registry.errors import RegistryError
from pipeline.registry.http import RetryPolicy
from pipeline.registry.reference import Reference
from pipeline.release import lookup, media, publish
from pipeline.release.annotate import INPUTS
from pipeline.release.attaching import Proofs
from pipeline.release.faults import ExportBroken, NotAsPushed, TagTaken
from pipeline.release.journal import Journal
from pipeline.release.layout import layout, read_content
from pipeline.release.lookup import Shelf
from pipeline.release.names import DEFAULT, Names
from pipeline.release.readback import check, hold
from pipeline.release.sign import Signer
from pipeline.release.upload import upload

QUICK = RetryPolicy(tries=3, pause=0.01, longest=0.1, silence=10)
NAMES = Names("tiny", 2, "0.6.16.post3", "cpu-x86-64")
TAG = "tiny-tp2-cpu-x86-64-fi0.6.16.post3-00000000"
INDEX, MANIFEST = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"
BASE = bytes(range(256)) * 400


def put(place: Path, data: bytes, kind: str, **more: Any) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    path = place / "blobs" / "sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **more}


def exported(
    place: Path, cache: bytes, notes: dict[str, str], *, attested: bool = True, base: bytes = BASE, source: str = "ours"
) -> tuple[str, str]:
    """Fill a layout as BuildKit does; the digests of its index and of the image's config."""
    gzip = "application/vnd.oci.image.layer.v1.tar+gzip"
    config = put(place, json.dumps({"cache": hashlib.sha256(cache).hexdigest()}).encode(), media.CONFIG)
    layers = [put(place, base, gzip), put(place, cache, gzip)]
    image = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers, "annotations": notes}
    entries = [put(place, json.dumps(image).encode(), MANIFEST, platform={"os": "linux", "architecture": "amd64"})]
    if attested:
        statement = {
            "predicateType": "https://slsa.dev/provenance/v0.2",
            "predicate": {"source": source, "metadata": {"buildStartedOn": time.time_ns()}},
        }
        notes_of_it = {"in-toto.io/predicate-type": statement["predicateType"]}
        said = put(place, json.dumps(statement).encode(), "application/vnd.in-toto+json", annotations=notes_of_it)
        value = {"schemaVersion": 2, "mediaType": MANIFEST, "config": put(place, b"{}", media.CONFIG), "layers": [said]}
        kind = {
            "vnd.docker.reference.type": "attestation-manifest",
            "vnd.docker.reference.digest": entries[0]["digest"],
        }
        entries.append(put(place, json.dumps(value).encode(), MANIFEST, annotations=kind))
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries, "annotations": notes}
    return put(place, json.dumps(index).encode(), INDEX)["digest"], config["digest"]


class Bench:
    """One image of this cache, its journal and its place at a registry."""

    def __init__(self, folder: Path, host: str, monkeypatch: pytest.MonkeyPatch, repository: str) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.registry = Registry(host, Credentials(), QUICK)
        self.place = Reference(host, repository, TAG)
        self.root = folder / "root"
        write(self.root)
        self.notes = {INPUTS: "1" * 64, "org.opencontainers.image.title": "tiny, tuned"}
        self.exports = 0
        self.proofs = Proofs(scanned=True)

    def publisher(self, notes: dict[str, str] | None = None) -> publish.Publisher:
        notes = notes or self.notes
        journal = Journal(self.folder, self.place.name, notes[INPUTS])
        return publish.Publisher(self.registry, self.place, journal, notes, "", self.folder / "layout", self.proofs)

    def publish(self, cache: bytes, *, verified: str = "", notes: dict[str, str] | None = None) -> publish.Published:
        notes = notes or self.notes
        config = exported(self.folder / "scratch", cache, notes)[1]

        def bake(_prepared: object, _keys: object, export: Any) -> Any:
            self.exports += 1
            return SimpleNamespace(image_id=exported(export.layout, cache, dict(export.annotations))[0])

        self.patch.setattr(publish, "bake", bake)
        done: Any = SimpleNamespace(
            built=SimpleNamespace(config_digest=verified or config), keys=collect([self.root]),
            prepared=SimpleNamespace(builder=SimpleNamespace(log=self.folder / "log")),
        )  # fmt: skip
        key = done.keys[0]
        found = Verdict(
            config, "sha256:" + "b" * 64, key.manifest_sha256, str(key.key), "A CPU", "replay", "pass", {"hits": 1}
        )
        return self.publisher(notes).publish(done, (found,))

    def find(self, inputs: str) -> Any:
        journal = Journal(self.folder / "fresh", self.place.name, inputs)
        return Shelf(self.registry, self.place.repository).find(DEFAULT, NAMES, journal)


@pytest.fixture
def bench(faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    name = request.node.name.split("[")[0].replace("_", "-")[:60].strip("-").lower()
    return Bench(tmp_path, faulty.host, monkeypatch, f"{name}/{tmp_path.name.lower().replace('_', '-').strip('-')}")


def test_an_image_gets_its_tag_last(bench: Bench, faulty: Any) -> None:
    done = bench.publish(b"a cache")
    assert done.new
    assert bench.registry.resolve(bench.place.repository, TAG) == done.digest
    puts = [one.path for one in faulty.seen if one.method == "PUT" and "/manifests/" in one.path]
    assert puts[-1].endswith(TAG), "the tag is the last thing that is written"
    own = [one for one in puts if "sha256-" not in one]
    assert len(set(own)) == len(own), "each manifest is put once"
    kinds = {one.artifact_type for one in bench.registry.referrers(bench.place.repository, done.digest)}
    assert kinds == {media.AUTOTUNE, media.VERDICT}


def test_what_is_there_is_not_pushed_again(bench: Bench, faulty: Any) -> None:
    first = bench.publish(b"a cache")
    faulty.seen.clear()
    again = bench.publish(b"a cache")
    assert (again.new, again.digest, bench.exports) == (False, first.digest, 1)
    assert [one.path for one in faulty.seen if one.method in ("PUT", "POST", "PATCH")] == []


def test_only_the_changed_layer_travels(bench: Bench, faulty: Any) -> None:
    bench.publish(b"a cache")
    faulty.seen.clear()
    bench.place = bench.place.tagged("another")
    other = {**bench.notes, INPUTS: "2" * 64}
    bench.publish(b"a cache that was tuned again", notes=other)
    uploads = [one for one in faulty.seen if one.method in ("PUT", "PATCH") and "/blobs/uploads/" in one.path]
    sizes = sorted(one.size for one in uploads if one.size)
    assert max(sizes) < 1000 < len(BASE), "the base's blob did not travel"
    assert len(b"a cache that was tuned again") in sizes


def test_a_tag_is_never_moved(bench: Bench, faulty: Any) -> None:
    first = bench.publish(b"a cache")
    faulty.seen.clear()
    with pytest.raises(TagTaken, match="never moved"):
        bench.publish(b"another cache", notes={**bench.notes, INPUTS: "2" * 64})
    assert bench.registry.resolve(bench.place.repository, TAG) == first.digest
    assert [one.path for one in faulty.seen if one.method in ("PUT", "POST", "PATCH")] == [], "nothing was pushed"


def test_a_tag_that_somebody_gave_meanwhile_is_not_moved(bench: Bench) -> None:
    seal = publish.Proofs.attach

    def attach(self: Any, registry: Registry, image: Reference, *rest: Any) -> bool:
        place = bench.folder / "theirs"
        content = read_content(place, exported(place, b"theirs", bench.notes)[0])
        upload(registry, image.repository, content)
        registry.put_manifest(image.repository, Manifest.of(content.path(content.top).read_bytes(), INDEX), TAG)
        return seal(self, registry, image, *rest)

    bench.patch.setattr(publish.Proofs, "attach", attach)
    with pytest.raises(TagTaken):
        bench.publish(b"ours")


@pytest.mark.parametrize("where", ["/blobs/uploads/", "/manifests/sha256:", "/referrers/", f"/manifests/{TAG}$"])
def test_a_registry_that_breaks_leaves_no_tag_and_the_next_run_goes_on(bench: Bench, faulty: Any, where: str) -> None:
    fault = faulty.fail(method="PUT|POST|GET", path=where, status=500)
    with pytest.raises(RegistryError):
        bench.publish(b"a cache")
    assert fault.hits >= QUICK.tries
    faulty.faults.clear()
    assert bench.registry.resolve(bench.place.repository, TAG) is None
    exports = bench.exports
    done = bench.publish(b"a cache")
    assert bench.registry.resolve(bench.place.repository, TAG) == done.digest
    if where in ("/referrers/",):
        assert bench.exports == exports, "what was pushed is not exported and pushed again"


def test_what_buildkit_exports_must_be_what_was_verified(bench: Bench, faulty: Any) -> None:
    with pytest.raises(ExportBroken, match="what was verified is sha256:0000"):
        bench.publish(b"a cache", verified="sha256:" + "0" * 64)
    assert [one.path for one in faulty.seen if one.method in ("PUT", "POST", "PATCH")] == []


def test_annotations_and_provenance_are_read_back(bench: Bench) -> None:
    place = bench.folder / "bare"
    digest, config = exported(place, b"c", {"a": "1"}, attested=False)
    upload(bench.registry, bench.place.repository, read_content(place, digest))
    held = hold(bench.registry, bench.place.repository, digest)
    with pytest.raises(NotAsPushed) as caught:
        check(held, digest, config, {"a": "1", "b": "2"})
    assert caught.value.details == (
        "the index came back without b", "the manifest came back without b", "it came back without provenance",
    )  # fmt: skip
    with pytest.raises(NotAsPushed, match="its config is"):
        check(held, digest, "sha256:" + "0" * 64, {})
    with pytest.raises(NotAsPushed, match="does not give"):
        check(hold(bench.registry, bench.place.repository, "sha256:" + "0" * 64), digest, config, {})


def test_released_inputs_are_found_by_a_host_that_knows_nothing(bench: Bench) -> None:
    assert bench.find("1" * 64) is None
    done = bench.publish(b"a cache")
    there = bench.find("1" * 64)
    assert (there.tag, there.digest) == (TAG, done.digest)
    assert bench.find("2" * 64) is None


def test_an_image_without_its_attachments_does_not_count_as_released(bench: Bench) -> None:
    place = bench.folder / "bare"
    content = read_content(place, exported(place, b"a cache", bench.notes)[0])
    upload(bench.registry, bench.place.repository, content)
    bench.registry.put_manifest(bench.place.repository, Manifest.of(content.path(content.top).read_bytes(), INDEX), TAG)
    assert bench.find("1" * 64) is None
    done = bench.publish(b"a cache")
    assert done.new, "what was missing is attached to what the tag stands for"
    assert (done.digest, bench.exports) == (content.top.digest, 0)
    assert bench.find("1" * 64).digest == done.digest


def test_an_image_that_another_key_signed_does_not_count_as_released(
    bench: Bench, programs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key that was rotated: the image is signed again, and its tag stays."""
    monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
    old, new = (Signer(str(samples.key_pair(tmp_path / name)[0])) for name in ("old", "new"))
    journal = Journal(bench.folder, bench.place.name, "1" * 64)

    def found(signer: Signer) -> Any:
        return Shelf(bench.registry, bench.place.repository, signer, signer.open()).find(DEFAULT, NAMES, journal)

    bench.proofs = Proofs(old, old.open(), scanned=True)
    first = bench.publish(b"a cache")
    assert found(old).digest == first.digest
    assert found(new) is None
    bench.proofs = Proofs(new, new.open(), scanned=True)
    assert (bench.publish(b"a cache").digest, bench.exports) == (first.digest, 1)
    assert found(old).digest == first.digest, "both signatures are there, and cosign is asked for the old one"
    monkeypatch.setattr(lookup, "is_signed_by", None)
    assert found(old).digest == first.digest, "what cosign said is remembered"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"base": b"other blobs than the config says"}, "its layers are other blobs"),
        ({"source": "theirs"}, "its provenance tells of another build"),
        ({"notes": {"org.opencontainers.image.title": "theirs"}}, "its annotations say something else"),
        ({}, ""),
    ],
    ids=["layers", "provenance", "annotations", "the same"],
)
def test_what_somebody_else_put_under_the_tag_is_signed_only_when_it_is_the_same(
    bench: Bench, programs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: dict[str, Any], why: str
) -> None:
    """The same config digest says nothing of blobs, annotations and provenance: whoever may push can choose those."""
    monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
    signer = Signer(str(samples.key_pair(tmp_path / "key")[0]))
    bench.proofs = Proofs(signer, signer.open(), scanned=True)
    notes = {**bench.notes, "org.opencontainers.image.revision": "another commit", **what.pop("notes", {})}
    place = tmp_path / "theirs"
    content = read_content(place, exported(place, b"a cache", notes, **what)[0])
    upload(bench.registry, bench.place.repository, content)
    bench.registry.put_manifest(bench.place.repository, Manifest.of(content.path(content.top).read_bytes(), INDEX), TAG)
    if not why:
        assert bench.publish(b"a cache").digest == content.top.digest
        assert (bench.publish(b"a cache").new, bench.exports) == (False, 1), "it is compared once"
        return
    with pytest.raises(TagTaken, match=why):
        bench.publish(b"a cache")
    assert bench.registry.tags(bench.place.repository) == (TAG,), "neither a signature nor a list of attachments"
    bench.proofs = Proofs(scanned=True)
    bench.publish(b"a cache")  # without a key nothing is vouched for
    bench.proofs = Proofs(signer, signer.open(), scanned=True)
    with pytest.raises(TagTaken, match=why):
        bench.publish(b"a cache")


def test_a_tag_without_provenance_is_neither_signed_nor_taken(bench: Bench) -> None:
    place = bench.folder / "bare"
    content = read_content(place, exported(place, b"a cache", bench.notes, attested=False)[0])
    upload(bench.registry, bench.place.repository, content)
    bench.registry.put_manifest(bench.place.repository, Manifest.of(content.path(content.top).read_bytes(), INDEX), TAG)
    with pytest.raises(TagTaken, match="without its provenance"):
        bench.publish(b"a cache")
    assert bench.registry.referrers(bench.place.repository, content.top.digest) == ()


def test_what_was_released_under_another_template_gets_its_new_tag(bench: Bench) -> None:
    first = bench.publish(b"a cache")
    journal = Journal(bench.folder, bench.place.name, "1" * 64)
    shelf = Shelf(bench.registry, bench.place.repository)
    assert shelf.find(DEFAULT, NAMES, journal).tag == TAG
    assert shelf.find("{model}-rc1", NAMES, journal) is None
    bench.place = bench.place.tagged("tiny-rc1")
    second = bench.publish(b"a cache")
    assert (second.digest, bench.exports) == (first.digest, 1), "what is pushed already gets the tag"
    assert shelf.find("{model}-rc1", NAMES, journal).tag == "tiny-rc1"


def test_moving_tags_move_and_are_left_where_they_are_right(bench: Bench, faulty: Any) -> None:
    first = bench.publish(b"a cache")
    assert publish.move(bench.registry, bench.place, first.digest, ("latest", "stable")) == ("latest", "stable")
    assert publish.move(bench.registry, bench.place, first.digest, ("latest",)) == ()
    bench.place = bench.place.tagged("another")
    second = bench.publish(b"another cache", notes={**bench.notes, INPUTS: "2" * 64})
    assert publish.move(bench.registry, bench.place, second.digest, ("latest",)) == ("latest",)
    assert bench.registry.resolve(bench.place.repository, "stable") == first.digest
    assert bench.registry.resolve(bench.place.repository, "latest") == second.digest


def test_exports_of_killed_runs_are_removed_and_those_of_others_never(tmp_path: Path) -> None:
    """A run in another container has another /proc: its lock tells that it lives, and no process number does."""
    gone = tmp_path / "exports" / "run-999999999-abc"
    gone.mkdir(parents=True)
    code = "import sys; from pathlib import Path; from pipeline.release.layout import layout\n"
    code += "with layout(Path(sys.argv[1])) as made: print(made, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path)]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode == 0:
        words = ["unshare", "--pid", "--fork", *words]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        with layout(tmp_path):
            assert theirs.is_dir() and not gone.exists()
        other.stdin.close()
    with layout(tmp_path) as first, layout(tmp_path) as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_damaged_layout_is_refused(tmp_path: Path) -> None:
    digest, _ = exported(tmp_path, b"c", {})
    with pytest.raises(ExportBroken):
        read_content(tmp_path, "sha256:" + "0" * 64)
    (tmp_path / "blobs" / "sha256" / digest.removeprefix("sha256:")).write_text('{"mediaType": "x", "manifests": []}')
    with pytest.raises(ExportBroken, match="0 images"):
        read_content(tmp_path, digest)
