"""Same in, same out: one cache gives one diff id, on two engines that were empty, one for each image store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(params=["classic", "containerd"])
def fresh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A private engine with an empty data root and the given store; stopped afterwards."""
    if os.geteuid() != 0:
        pytest.skip("a private engine needs root")
    from pipeline.daemon import at_address, private

    own = tmp_path_factory.mktemp(f"engine-{request.param}")
    at = private.folders(own / "tuned-image-pipeline")
    private.start(at, request.param)
    try:
        yield at_address(at.host, "private")
    finally:
        private.stop(at)


def test_the_cache_layer_is_the_same_on_both_stores(
    fresh: Any, built: dict[str, Any], stored_root: Any, home: Path, tmp_path: Path
) -> None:
    from pipeline.daemon import connect
    from pipeline.image.bake import Layer, finished
    from pipeline.image.buildx import Build, build
    from pipeline.image.contexts import Destination, stage_layer
    from pipeline.image.session import Session

    root = stored_root(home, built).parents[1]
    path = built["caches"][-1]["path"]
    (tmp_path / "home" / "contexts").mkdir(parents=True)
    place = stage_layer(root, path, Destination(path), tmp_path / "context", keep_times=False, writable=False)
    text = finished(b"FROM scratch AS final\n", [Layer("cache-0", path)], {}, None)
    with closing(connect(fresh)) as client:
        session = Session(fresh, client, tmp_path / "home", tmp_path / "log")
        build(session, Build(text, "final", {"cache-0": place}, tag="same:layer"))
        assert client.images.get("same:layer").attrs["RootFS"]["Layers"] == [built["cache_diff_id"]]
