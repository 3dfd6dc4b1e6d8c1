"""What breaks a warm-up or a baked image, with the real server: minutes each, run by `make test-servers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_vllm import IMAGE, ROOT, Pipeline

from pipeline.servers import kinds, words
from pipeline.servers.containers import How, watch
from pipeline.servers.model import config_files
from pipeline.servers.producer import ServerProducer, manifest_in

pytestmark = [pytest.mark.usefixtures("built"), pytest.mark.engine, pytest.mark.large, pytest.mark.timeout(5400)]


def start(client: Any, arguments: str, how: How, tmp_path: Path, **environment: str) -> Any:
    """One start in the finished image."""
    told, _ = manifest_in(client, IMAGE)
    said = words.parse("vllm", arguments, " ".join(f"{name}={value}" for name, value in environment.items()))
    producer = ServerProducer(said, config_files("tiny", ROOT / "pipeline" / "models"), "tiny", "cpu")
    spec = producer.spec(ready=900.0, most=1, pack=False)
    return watch(client, IMAGE, spec, told.model, how, out=tmp_path / "out", logfile=tmp_path / "log").starts[0]


SAME = "--model /mnt/models --max-model-len 512 --max-num-seqs 8"


def test_an_empty_mount_starts_cold_and_well(client: Any, tmp_path: Path) -> None:
    found = start(client, SAME, How("12345:12345", read_only=True, empty=True), tmp_path)
    assert found.outcome == "ready"
    assert kinds.count(found.new)


@pytest.mark.parametrize("arguments", [SAME.replace("/mnt/models", "/mnt/models/"), f"{SAME}0"])
def test_other_words_are_a_miss_and_start(client: Any, tmp_path: Path, arguments: str) -> None:
    found = start(client, arguments, How(), tmp_path)
    assert found.outcome == "ready"
    assert kinds.count(found.new)


def test_arguments_that_the_server_refuses(client: Any, tmp_path: Path) -> None:
    found = start(client, f"{SAME} --no-such-option 3", How(), tmp_path)
    assert found.outcome == "died"
    assert any("no-such-option" in line for line in found.tail())


def test_two_ranks(pipeline: Pipeline) -> None:
    arguments = f"{SAME} --tensor-parallel-size 2"
    done = pipeline(
        "build", "tiny", "--server", "vllm", "--image", "servers-test/tp2:1", "--server-args", arguments,
        "--server-env", "VLLM_CPU_OMP_THREADS_BIND=0|1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


def test_a_cache_that_grows_is_named(pipeline: Pipeline) -> None:
    done = pipeline(
        "build", "tiny", "--server", "vllm", "--image", "servers-test/grows:1", "--server-env", "VLLM_USE_AOT_COMPILE=1"
    )
    assert "grows with every start" in done.stderr
