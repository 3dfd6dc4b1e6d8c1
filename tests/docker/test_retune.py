"""A further cache for an image that exists; everything below and beside stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

NAME = "tuned-test/retune:one"


@pytest.fixture(scope="module")
def mine(client: Any, built: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tuned image under a name of our own, which may move."""
    client.images.get(built["image_id"]).tag("tuned-test/retune", "one")
    yield built
    for tag in ("one", "two", "grafted"):
        if client.images.list(name=f"tuned-test/retune:{tag}"):
            client.images.remove(f"tuned-test/retune:{tag}", force=True)


def config(client: Any, image: str) -> dict[str, Any]:
    return {name: client.images.get(image).attrs["Config"][name] for name in ("User", "Entrypoint", "Cmd", "Env")}


def layers(client: Any, image: str) -> list[str]:
    return list(client.images.get(image).attrs["RootFS"]["Layers"])


def test_a_grafted_cache_is_one_more_layer(mine: dict[str, Any], pipeline: Any, client: Any) -> None:
    small = ("--tp", "1", "--buckets", "1,4", "--ops", "qkv", "--judge", "off")
    tuned = pipeline("tune", "tiny", *small, "--json")
    assert tuned.status == 0, tuned.stderr
    root, key = Path(tuned.json()["root"]), tuned.json()["key"]
    before, was = layers(client, NAME), config(client, NAME)
    done = pipeline("cache", "add", NAME, str(root), "--image", "tuned-test/retune:grafted", "--json")
    assert done.status == 0, done.stderr
    told = done.json()
    made = told["image"]
    assert told["verdict"]["level"] == "replay"
    assert layers(client, made)[:-1] == before
    assert config(client, made) == was
    assert told["keys"] == [mine["key"], key]
    assert client.images.get(made).labels["io.github.tuned-image-pipeline.key"] == f"{mine['key']},{key}"
    assert layers(client, NAME) == before, "the image that was grafted onto stays"
    # The layer is the one that a bake of the same cache makes.
    baked = pipeline("build", "tiny", *small, "--cache", str(root), "--image", "tuned-test/retune:two", "--json")
    assert baked.status == 0, baked.stderr
    assert layers(client, made)[-1] == baked.json()["cache_diff_id"]
    again = pipeline("cache", "add", made, str(root))
    assert again.status == 2
    assert "holds" in again.stderr


def other_layouts(client: Any, pipeline: Any) -> None:
    """An image of older code (no label of its layout) and one of newer code: one line, with the way out."""
    for changes, said in ((), "has image layout 1, which an older"), (("LABEL {}.layout=99",), "99, which a newer"):
        prefix = "io.github.tuned-image-pipeline"
        labels = [text.format(prefix) for text in (*changes, "LABEL {}.key=0.6/cpu-x86_64/0")]
        empty = b"\0" * 10240  # a tar without members
        client.api.import_image_from_data(empty, repository="tuned-test/retune", tag="two", changes=labels)
        done = pipeline("verify", "tuned-test/retune:two")
        assert done.status == 7, done.stderr
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert said in line and "verifies and changes layout" in line
        assert "hint: build it again: `pipeline build`" in done.stderr
        client.images.remove("tuned-test/retune:two", force=True)


def test_what_cannot_be_changed_is_refused_by_name(
    mine: dict[str, Any], pipeline: Any, client: Any, tmp_path: Path
) -> None:
    base = client.images.get(mine["image_id"]).labels["org.opencontainers.image.base.name"]
    count = len(client.images.list(all=True))
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("cache", "add", "tuned-test/none:1", "."), 2, "there is no image"),
        (("cache", "add", "Not A Name", "."), 2, "cannot name an image"),
        (("cache", "add", base, str(tmp_path / "none")), 2, "is not a directory"),
    ]
    for words, status, said in cases:
        done = pipeline(*words)
        assert (done.status, "Traceback" in done.stderr) == (status, False), done.stderr
        assert said in done.stderr, done.stderr
    tuned = pipeline("tune", "tiny", "--tp", "1", "--buckets", "1,4", "--ops", "qkv", "--judge", "off", "--json")
    root = Path(tuned.json()["root"])
    done = pipeline("cache", "add", base, str(root))
    assert done.status == 2, done.stderr
    assert "torch and FlashInfer" in done.stderr
    other_layouts(client, pipeline)
    assert len(client.images.list(all=True)) <= count + 1
