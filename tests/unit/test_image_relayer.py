"""Exchanging an image's last layers: its configuration, and what the engine is given to load."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest

from pipeline.contract.digest import sha256_bytes
from pipeline.image.relayer import archive, changed_config

CONFIG: dict[str, Any] = {
    "architecture": "amd64",
    "created": "2020-01-01T00:00:00Z",
    "config": {"User": "1234", "Env": ["A=b"], "Entrypoint": ["/e"], "Labels": {"theirs": "kept", "key": "old"}},
    "rootfs": {"type": "layers", "diff_ids": ["sha256:1", "sha256:2", "sha256:3"]},
    "history": [
        {"created_by": "base"},
        {"created_by": "ENV", "empty_layer": True},
        {"created_by": "code"},
        {"created_by": "cache"},
        {"created_by": "USER", "empty_layer": True},
    ],
}


@pytest.mark.parametrize(("drop", "kept"), [(0, ["base", "code", "cache"]), (1, ["base", "code"]), (2, ["base"])])
def test_only_layers_labels_and_their_history_change(drop: int, kept: list[str]) -> None:
    before = json.dumps(CONFIG)
    made = changed_config(CONFIG, drop=drop, diff_ids=["sha256:9"], labels={"key": "new"}, said="COPY")
    assert json.dumps(CONFIG) == before
    assert made["rootfs"]["diff_ids"] == [*[f"sha256:{n + 1}" for n in range(3 - drop)], "sha256:9"]
    filled = [step["created_by"] for step in made["history"] if not step.get("empty_layer")]
    assert filled == [*kept, "COPY"]
    assert len(filled) == len(made["rootfs"]["diff_ids"]), "a step of the history for each layer"
    assert made["config"]["Labels"] == {"theirs": "kept", "key": "new"}
    assert {**made["config"], "Labels": 0} == {**CONFIG["config"], "Labels": 0}


def test_an_image_without_labels_and_history_gets_labels() -> None:
    bare = {"config": {"Labels": None}, "rootfs": {"diff_ids": ["sha256:1"]}}
    made = changed_config(bare, drop=0, diff_ids=["sha256:9"], labels={"key": "new"}, said="COPY")
    assert made["config"]["Labels"] == {"key": "new"}
    assert "history" not in made


@pytest.mark.parametrize("media", ["application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"])  # fmt: skip
def test_the_archive_names_the_layers_below_and_holds_the_new_ones(media: str) -> None:
    made = changed_config(CONFIG, drop=1, diff_ids=["sha256:" + sha256_bytes(b"tar")], labels={}, said="COPY")
    below = [{"mediaType": "l", "digest": "sha256:aa", "size": 1}, {"mediaType": "l", "digest": "sha256:bb", "size": 2}]
    with tarfile.open(fileobj=io.BytesIO(archive(made, below, [b"tar"], media=media))) as tar:
        files = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    (listed,) = json.loads(files["manifest.json"])
    assert listed["Layers"][:2] == ["blobs/sha256/aa", "blobs/sha256/bb"]
    assert not set(listed["Layers"][:2]) & set(files), "what the engine has is not sent again"
    assert files[listed["Layers"][2]] == b"tar"
    assert json.loads(files[listed["Config"]]) == made
    entry = json.loads(files["index.json"])["manifests"][0]
    manifest = json.loads(files["blobs/sha256/" + entry["digest"][7:]])
    assert (manifest["mediaType"], entry["mediaType"]) == (media, media)
    assert [one["digest"] for one in manifest["layers"][:2]] == ["sha256:aa", "sha256:bb"]
    assert manifest["layers"][2]["digest"] == "sha256:" + sha256_bytes(b"tar")
    assert manifest["config"]["digest"] == "sha256:" + sha256_bytes(files[listed["Config"]])


def test_an_export_without_oci_manifest_is_named_by_diff_ids() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive(CONFIG, [{}, {}, {}], [], media="m"))) as tar:
        files = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    assert "index.json" not in files
    assert json.loads(files["manifest.json"])[0]["Layers"] == [f"blobs/sha256/{n}" for n in "123"]
