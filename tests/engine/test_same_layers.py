"""Same in, same out: one cache gives one diff id, on two engines that were empty, one for each image store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
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
    from pipeline.engine import private
    from pipeline.engine.finding import at_address
    from pipeline.engine.places import places

    own = tmp_path_factory.mktemp(f"engine-{request.param}")
    at = places(own / "tuned-image-pipeline")
    private.start(at, request.param)
    try:
        yield at_address(at.host, "private")
    finally:
        private.stop(at)


LAYERS: dict[str, tuple[str, ...]] = {}


def test_the_cache_layer_is_the_same_on_both_stores(
    fresh: Any, client: Any, built: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    from pipeline.cache.archive import safe_extract
    from pipeline.contract.places import CACHE_ROOT
    from pipeline.engine import connect
    from pipeline.engine.buildx import environment
    from pipeline.image.buildkit import Builder, Stage
    from pipeline.image.caches import collect
    from pipeline.image.contexts import FIXED_TIME, stage_key
    from pipeline.image.saved import read_saved
    from pipeline.image.staging import Staging

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
    assert saved.diff_ids[-1] == built["cache_diff_id"], "the layer differs from the one that `pipeline image` baked"
    LAYERS[fresh.store] = saved.diff_ids
    assert len(set(LAYERS.values())) == 1, f"the stores differ: {LAYERS}"
