"""Same in, same out: one cache gives one diff id, on two engines that were empty, one for each image store.

And what a look at an image tells, on both: the same as its export, which takes far longer.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["classic", "containerd"])
def fresh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A private engine of our own with an empty data root and the given store; stopped afterwards."""
    if os.geteuid() != 0:
        pytest.skip("a private engine needs root")
    from pipeline.daemon import at_address, private

    own = tmp_path_factory.mktemp(f"engine-{request.param}")
    at = private.places(own / "tuned-image-pipeline")
    private.start(at, request.param)
    try:
        yield at_address(at.host, "private")
    finally:
        private.stop(at)


LAYER = bytes(10240)  # a tar without members
LAYERS: dict[str, tuple[str, ...]] = {}


def inventory(client: Any) -> tuple[Any, ...]:
    """All names and ids of images, and all containers."""
    images = sorted((one.id, *one.attrs["RepoTags"], *one.attrs["RepoDigests"]) for one in client.images.list(all=True))
    return images, client.containers.list(all=True)


def test_the_cache_layer_is_the_same_on_both_stores(
    fresh: Any, client: Any, built: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.cache.archive import safe_extract
    from pipeline.contract.places import CACHE_ROOT
    from pipeline.daemon import connect
    from pipeline.daemon.buildx import environment
    from pipeline.image.buildkit import Builder, Stage
    from pipeline.image.caches import collect
    from pipeline.image.contexts import FIXED_TIME, stage_key
    from pipeline.image.identity import identify
    from pipeline.image.layers import strangers
    from pipeline.image.saved import read_saved
    from pipeline.image.staging import Staging
    from pipeline.image.verify import read_keys

    base = client.images.get(built["image_id"]).labels["org.opencontainers.image.base.name"]
    container = client.containers.create(built["image_id"], ["true"])  # a re-tune may have replaced the store's root
    try:
        chunks, _ = container.get_archive(CACHE_ROOT)
        safe_extract(chunks, root := tmp_path / "root", strip=1)
    finally:
        container.remove(force=True)
    staging = Staging(tmp_path)
    contexts = {
        "code": staging.code(), "modules": staging.empty(), "plan": staging.empty(), "previous": staging.empty(),
        "tuned": stage_key(collect([root])[0], tmp_path / "tuned"),
    }  # fmt: skip
    with closing(connect(fresh)) as other:
        assert other.images.list(all=True) == []
        archive = tmp_path / "base.tar"
        with archive.open("wb") as stream:
            for chunk in client.images.get(base).save(named=base):
                stream.write(chunk)
        with archive.open("rb") as stream:
            other.images.load(stream)
        arguments = {"BASE_IMAGE": base, "SOURCE_DATE_EPOCH": str(FIXED_TIME)}
        text = (ROOT / "docker" / "Dockerfile.overlay").read_bytes()
        builder = Builder(environment(fresh), text, tmp_path, staging.empty(), tmp_path / "log")
        image = builder.build(Stage("final", contexts=contexts, arguments=arguments))
        saved = read_saved(other, image.image_id)
        stage_key(collect([root])[0], strayed := tmp_path / "strayed")
        (strayed / "etc").mkdir()
        (strayed / "etc" / "stray").write_bytes(b"x")
        worse = builder.build(Stage("final", contexts=contexts | {"tuned": strayed}, arguments=arguments))
        keys, wrong = read_keys(other, image.image_id, tmp_path / "keys")
        assert len(keys) == 1 and not wrong
        before = inventory(other)
        # From here on without the export: the classic store names sizes, the containerd store pushes to us.
        monkeypatch.setattr("pipeline.image.saved.small_files", None)
        good, bad = (identify(other, one.image_id, count=1, look=fresh.look) for one in (image, worse))
        assert inventory(other) == before
    assert (good.config_digest, good.diff_ids) == (saved.config_digest, saved.diff_ids)
    assert good.names == (saved.last if fresh.containerd_store else None)
    assert list(strangers(good, keys)) == []
    (finding,) = strangers(bad, keys)
    assert ("/etc/stray" if fresh.containerd_store else "they are not alone") in finding
    assert saved.diff_ids[-1] == built["cache_diff_id"], "the layer differs from the one that `pipeline build` baked"
    LAYERS[fresh.store] = saved.diff_ids
    assert len(set(LAYERS.values())) == 1, f"the stores differ: {LAYERS}"


def built_here(fresh: Any, client: Any, folder: Path, *words: str) -> str:
    """Build a small image on an engine and return its id."""
    from pipeline.daemon.buildx import environment

    known = {one.id for one in client.images.list(all=True)}
    command = ["docker", "buildx", "build", "--quiet", *words, str(folder)]
    subprocess.run(command, env={**os.environ, **environment(fresh)}, check=True, capture_output=True, timeout=600)
    (new,) = {one.id for one in client.images.list(all=True)} - known
    return str(new)


def test_a_look_shows_what_the_export_holds_and_leaves_nothing(
    fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.daemon import connect
    from pipeline.daemon.look import Look
    from pipeline.image import peek as module
    from pipeline.image.relayer import relayer
    from pipeline.image.saved import read_saved, saved_of

    assert (fresh.look is Look.PUSHED) == fresh.containerd_store
    if not fresh.containerd_store:
        return  # it has no blobs to push: each push would compress the whole image
    (tmp_path / "a").write_bytes(os.urandom(50_000))
    text = "FROM scratch\nARG TARGETARCH\nCOPY a /opt/$TARGETARCH/a\nCOPY a /opt/b\nCOPY a /opt/c\n"
    (tmp_path / "Dockerfile").write_text(text)
    platforms = "--platform=linux/arm64,linux/amd64"
    with closing(connect(fresh)) as other:
        images = [
            built_here(fresh, other, tmp_path, "--provenance=false"),  # no name: the engine must not remove it
            built_here(fresh, other, tmp_path, "--provenance=mode=max", "--tag=look/attested:1"),
            built_here(fresh, other, tmp_path, "--provenance=mode=min", platforms, "--tag=look/several:1"),
        ]
        before = inventory(other)
        for image in images:
            saved = read_saved(other, image, count=2)
            assert saved.last == (("opt/c",), ("opt/b",))
            assert saved_of(module.look(other, image, count=2), image, count=2) == saved
            assert inventory(other) == before
        relayered = {
            relayer(other, images[0], drop=1, layers=[LAYER], labels={}, said="COPY", look=look)
            for look in (Look.PUSHED, Look.EXPORTED)
        }
        assert len(relayered) == 1, "the layers below are named alike"
        other.images.remove(relayered.pop(), force=True)

        @contextmanager
        def elsewhere(registry: Any) -> Iterator[str]:
            yield f"127.0.0.1:9/{registry.name}"

        with monkeypatch.context() as patched:
            patched.setattr(module, "serving", elsewhere)  # as a remote engine's loopback is
            assert module.peek(other, images[0], count=1) is None
        assert inventory(other) == before
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(module, "_candidates", interrupt)
            module.peek(other, images[0], count=1)
        assert inventory(other) == before


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
