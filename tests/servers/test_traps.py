"""What breaks a warm-up or a baked image, with the real server: minutes each, run by `make test-servers`."""

from __future__ import annotations

import io
import json
import shlex
import signal
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from real_vllm import ARGS, IMAGE, OWN, ROOT, Pipeline
from release_registries import Running

from pipeline.contract.verdict import Verdict
from pipeline.daemon import Engine, at_address, connect, private
from pipeline.image.session import LABEL, RUN
from pipeline.servers import kinds, words
from pipeline.servers.containers import How, manifest_in, watch
from pipeline.servers.producer import ServerProducer
from pipeline.servers.watch import Order

pytestmark = [pytest.mark.engine, pytest.mark.large, pytest.mark.timeout(5400)]

TWO_RANKS = f"{ARGS} --tensor-parallel-size 2"
ANYBODY = "12345:12345"


def start(
    client: Any,
    arguments: str,
    how: How,
    tmp_path: Path,
    *,
    image: str = IMAGE,
    ready: float = 900.0,
    **environment: str,
) -> Any:
    """One start in the finished image."""
    (said,) = words.parse("vllm", arguments, "")
    spec = ServerProducer((said,), {}, "tiny", "cpu").spec(said, ready=ready, most=1)
    order = Order((replace(spec, environment={**spec.environment, **environment}),))
    model = manifest_in(client, IMAGE)[0].sets[0].model
    return watch(client, image, order, model, how, out=tmp_path / "out", logfile=tmp_path / "log").starts[0][0]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("arguments", "how", "environment"),
    [
        pytest.param(ARGS, How(user=ANYBODY, read_only=True, empty=True), {}, id="an empty mount"),
        pytest.param(ARGS, How(user="0:0"), {"PIPELINE_SERVER_CACHES": "/opt/cold"}, id="the caches left out"),
        pytest.param(ARGS.replace("/mnt/models", "/mnt/models/"), How(), {}, id="another spelling"),
        pytest.param(ARGS.replace("seqs 8", "seqs 80"), How(), {}, id="another value"),
    ],
)
def test_no_caches_and_other_words_start_well(
    client: Any, tmp_path: Path, arguments: str, how: How, environment: dict[str, str]
) -> None:
    found = start(client, arguments, how, tmp_path, **environment)
    assert found.outcome == "ready", found.tail()
    compiled = [path for path in found.new if "/inductor/fxgraph/" in path]
    if environment:
        assert compiled and not kinds.count(found.new), "nothing is written below the root of the baked caches"
    elif how.empty:
        assert compiled
    else:  # without AOT vLLM for CPUs asks Inductor alone, whose key is the graph: these words are a hit there
        assert not compiled


@pytest.fixture
def moved(client: Any, built: dict[str, Any]) -> Iterator[str]:
    """The image with its caches moved to /opt/moved."""
    words = ["sh", "-c", f"cp -a {kinds.ROOT} /opt/moved && rm -r {kinds.ROOT}"]
    container = client.containers.create(IMAGE, words, entrypoint=[], user="0:0")
    container.start()
    assert container.wait()["StatusCode"] == 0
    container.commit(f"{OWN}/moved", "1")
    container.remove()
    yield f"{OWN}/moved:1"
    client.images.remove(f"{OWN}/moved:1", force=True)


def test_moved_caches_break_no_start_and_are_named(
    client: Any, tmp_path: Path, moved: str, built: dict[str, Any], pipeline: Pipeline
) -> None:
    places = {
        name: value.replace(kinds.ROOT, "/opt/moved")
        for name, value in built["environment"].items()
        if value.startswith(kinds.ROOT)
    }
    found = start(client, ARGS, How(user=ANYBODY), tmp_path, image=moved, **places)
    assert found.outcome == "ready", found.tail()
    given = [word for name, value in places.items() for word in ("-e", f"{name}={value}")]
    done = pipeline("explain", IMAGE, *given, "--", *shlex.split(ARGS))
    assert done.returncode == 7
    assert (
        "TORCHINDUCTOR_CACHE_DIR /opt/moved/inductor, baked with /opt/warm/inductor (it places a cache)" in done.stdout
    )


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("arguments", "status", "said"), [(ARGS, 0, "what"), (f"{ARGS} --dtype float32", 7, "nothing that")]
)
def test_explain_asks_the_server_for_its_own_hash(pipeline: Pipeline, arguments: str, status: int, said: str) -> None:
    done = pipeline("explain", IMAGE, "--live", "--", *shlex.split(arguments))
    assert done.returncode == status, done.stderr
    assert f"the server's own hash of its configuration is that of {said} was baked" in done.stdout


@pytest.mark.usefixtures("built")
def test_arguments_that_the_server_refuses(client: Any, tmp_path: Path) -> None:
    found = start(client, f"{ARGS} --no-such-option 3", How(), tmp_path)
    assert found.outcome == "died"
    assert any("no-such-option" in line for line in found.tail())
    assert "no-such-option" in (tmp_path / "log").read_text(), "all that it printed is in the log"


HURT = """
import os, pathlib, time
while True:
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(b"VLLM::Worker_TP1"):
                time.sleep(2)  # a rank that dies at once has no name yet
                os.kill(int(file.parent.name), SIGNAL)
                raise SystemExit
        except OSError:
            pass
    time.sleep(0.1)
"""


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("sign", "ready", "outcome", "message"),
    [
        (signal.SIGKILL, 900.0, "died", "VLLM::Worker_TP1 ended"),
        (signal.SIGSTOP, 240.0, "timeout", "VLLM::Worker_TP1 was stopped"),
    ],
)
def test_a_rank_that_dies_or_hangs_is_named(
    client: Any, tmp_path: Path, sign: signal.Signals, ready: float, outcome: str, message: str
) -> None:
    def hurt() -> None:
        while not (found := client.containers.list(filters={"label": f"{LABEL}={RUN}", "ancestor": IMAGE})):
            time.sleep(0.5)
        found[0].exec_run(["python3", "-c", HURT.replace("SIGNAL", str(int(sign)))], user="0:0")

    Thread(target=hurt, daemon=True).start()
    found = start(client, TWO_RANKS, How(), tmp_path, ready=ready, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert found.outcome == outcome
    assert found.message.count("VLLM::Worker_TP1") == 1
    assert message in found.message
    assert found.tail()


def test_two_ranks(pipeline: Pipeline) -> None:
    done = pipeline(
        "build", "tiny", "--server", "vllm", "--image", f"{OWN}/tp2:1", "--server-args", TWO_RANKS,
        "--server-env", "VLLM_CPU_OMP_THREADS_BIND=0|1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


def test_two_sets_of_arguments(pipeline: Pipeline) -> None:
    one, two = ARGS, ARGS.replace("512", "256")
    done = pipeline(
        "build",
        "tiny",
        "--server",
        "vllm",
        "--image",
        f"{OWN}/sets:1",
        "--server-args",
        f"{one} -- {two}",
        "--json",
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert json.loads(done.stdout)["verdict"]["checks"]["starts"] == 4
    assert done.stderr.count("inductor: hit") == 4
    for said in (one, two):
        assert pipeline("explain", f"{OWN}/sets:1", "--", *shlex.split(said)).returncode == 0


def test_a_hub_id_is_baked_offline(client: Any, pipeline: Pipeline) -> None:
    arguments = ARGS.replace("/mnt/models", f"org/tiny --revision {'0a' * 20}")
    words = ["build", "tiny", "--server", "vllm", "--image", f"{OWN}/hub:1", "--server-args", arguments]
    done = pipeline(*words, "--server-env", "HF_HUB_OFFLINE=1 HF_HOME=/models/hf")
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr.count("inductor: hit") == 2
    done = pipeline("explain", f"{OWN}/hub:1", "-e", "HF_HUB_OFFLINE=0", "--", *shlex.split(arguments))
    assert (done.returncode, "an online server names a hub model otherwise" in done.stdout) == (7, True)
    client.images.remove(f"{OWN}/hub:1", force=True)


def test_a_cache_that_grows_is_named(pipeline: Pipeline) -> None:
    done = pipeline(
        "build", "tiny", "--server", "vllm", "--image", f"{OWN}/grows:1", "--server-env", "VLLM_USE_AOT_COMPILE=1"
    )
    assert "grows with every start" in done.stderr


def inside(client: Any, image: str, words: list[str], tmp_path: Path, **files: bytes) -> Path:
    """Run `pipeline` in a container of `image`, as a cluster would; what it wrote to /out, where `files` lie too."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as stream:
        for file in (ROOT / "pipeline").rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                stream.add(file, Path("src", file.relative_to(ROOT)))
        for name, data in files.items():
            member = tarfile.TarInfo(f"out/{name}")
            member.size = len(data)
            stream.addfile(member, io.BytesIO(data))
    container = client.containers.create(
        image, ["python3", "-m", "pipeline", *words], entrypoint=[], network_mode="none",
        environment={"PYTHONPATH": "/src"}, volumes=["/src", "/out"], shm_size=1 << 30,
    )  # fmt: skip
    try:
        container.put_archive("/", packed.getvalue())
        container.start()
        assert container.wait()["StatusCode"] == 0, container.logs(tail=60).decode()
        chunks, _ = container.get_archive("/out")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as stream:
            stream.extractall(tmp_path, filter="data")
    finally:
        container.remove(force=True, v=True)
    return tmp_path / "out"


def test_a_warm_up_without_a_docker_engine_is_sent_and_baked(
    client: Any, tmp_path: Path, pipeline: Pipeline, built: dict[str, Any], registry: Running
) -> None:
    base = client.images.get(IMAGE).labels["org.opencontainers.image.base.name"]
    words = ["warm-up", "tiny", "--in-place", "/out/caches", "--server", "vllm", "--server-args", ARGS]
    made = inside(client, base, [*words, "--device", "cpu"], tmp_path)
    name, folder = f"oci://{registry.host}/warm-ups/tiny:1", tmp_path / "pulled"
    done = pipeline("cache", "push", str(made / "caches"), name)
    assert done.returncode == 0, done.stderr
    done = pipeline("cache", "pull", name, "-o", str(folder))
    assert done.returncode == 0, done.stderr
    words = ["build", "tiny", "--server", "vllm", "--server-args", ARGS, "--image", f"{OWN}/placed:1"]
    done = pipeline(*words, "--cache", str(folder))
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr.count("inductor: hit") == 2
    client.images.remove(f"{OWN}/placed:1", force=True)


def test_an_image_is_proven_without_a_docker_engine(client: Any, tmp_path: Path, built: dict[str, Any]) -> None:
    about = {**built["verdict"], "level": "static", "checks": {"manifests": 1}, "starts": {}}
    words = ["verify", "/out/static", "--in-place", "-o", "/out/proven"]
    made = inside(client, IMAGE, words, tmp_path, static=json.dumps(about).encode())
    verdict = Verdict.load((made / "proven").read_bytes())
    assert (verdict.level, verdict.result, verdict.identity) == ("replay", "pass", about["identity"])
    assert verdict.checks["starts"] == 1
    assert verdict.replayed_keys() == (about["key"],)


@pytest.fixture
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Another engine, which has no image; stopped afterwards."""
    at = private.folders(tmp_path_factory.mktemp("second") / "tuned-image-pipeline")
    private.start(at, "classic")
    try:
        yield at_address(at.host, "private")
    finally:
        private.stop(at)


def test_hits_after_a_push_and_a_pull(
    client: Any, built: dict[str, Any], registry: Running, second: Engine, pipeline: Pipeline
) -> None:
    name = f"{registry.host}/servers/tiny"
    image = client.images.get(IMAGE)
    image.tag(name, "1")
    said = client.images.push(name, "1")
    client.images.remove(f"{name}:1")
    with closing(connect(second)) as other:
        pulled = other.images.pull(name, "1")
        assert pulled.attrs["RootFS"] == image.attrs["RootFS"], said
    done = pipeline("verify", f"{name}:1", host=second.host)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr.count("inductor: hit") == 2
