"""A whole release: a real engine with the containerd store, a real registry behind a proxy that counts, real cosign."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "release")]

import release_debian  # noqa: E402 - lies beside the tests of the registry
from release_faults import Proxy, Seen  # noqa: E402
from release_registries import running  # noqa: E402
from release_slurm import EXAMPLES, Slurm, cluster  # noqa: E402

from pipeline.release.attachments import AUTOTUNE, CYCLONEDX  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

PASSWORD = "a pass+word/of the key"
WRITES = ("PUT", "POST", "PATCH")
# Bytes that a re-tune sends beside the cache layer, the gzipped manifest and the SBOM: config, index, provenance, verdict,
# signatures and tags, seen to be 43,904. Any layer but the cache's is larger than what is left to the bound.
FIXED = 64_000
MATRIX = """
[annotations]
"org.opencontainers.image.licenses" = "Apache-2.0"

[[cells]]
model = "tiny"
tp = 1
device = "cpu"
ops = ["o"]
buckets = [1, 8]
compare = "off"

[[cells]]
model = "tiny"
tp = 2
device = "cpu"
name = "other"
cache = "nowhere"
"""


@dataclass(frozen=True)
class Ran:
    status: int
    told: dict[str, Any]
    stderr: str

    @property
    def cell(self) -> dict[str, Any]:
        """The cell that can be released."""
        return self.told["cells"][0]


@dataclass(frozen=True)
class Shop:
    """An engine and a registry of our own, and a folder with a matrix and a key."""

    folder: Path
    proxy: Proxy
    env: dict[str, str]

    def start(self, *words: str, action: str = "run") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pipeline", "release", action, "--registry", self.proxy.host, "--json"]
        command += ["--matrix", str(self.folder / "release.toml"), "--sign", str(self.folder / "cosign.key"), *words]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def release(self, *words: str, action: str = "run") -> Ran:
        self.proxy.seen.clear()
        process = self.start(*words, action=action)
        out, err = process.communicate(timeout=1500)
        assert "Traceback" not in err, err
        return Ran(process.returncode, json.loads(out) if out else {}, err)

    def written(self) -> list[Seen]:
        return [one for one in self.proxy.seen if one.method in WRITES]

    def sent(self) -> list[Seen]:
        """What has a body: an upload is begun without one, also to see whether one may push."""
        return [one for one in self.written() if one.size]

    def skopeo(self, *words: str, image: str) -> bytes:
        """What skopeo reads at the registry itself, past the proxy."""
        name = image.replace(self.proxy.host, self.proxy.upstream)
        command = ["skopeo", "inspect", *words, "--tls-verify=false", f"docker://{name}"]
        return subprocess.run(command, capture_output=True, check=True, timeout=300).stdout

    def manifest(self, image: str) -> dict[str, Any]:
        """The manifest of the image in an index."""
        index = json.loads(self.skopeo("--raw", image=image))
        inner = f"{image.rpartition('@')[0]}@{index['manifests'][0]['digest']}"
        return json.loads(self.skopeo("--raw", image=inner))

    def attached(self, cell: dict[str, Any], kind: str) -> list[str]:
        """Digests of the blobs that are attached to an image, of one type."""
        repository = cell["image"].rpartition(":")[0]
        index = json.loads(self.skopeo("--raw", image=f"{repository}@{cell['digest']}"))
        digest = index["manifests"][0]["digest"]
        listed = json.loads(self.skopeo("--raw", image=f"{repository}:{digest.replace(':', '-')}"))["manifests"]
        found = [one["digest"] for one in listed if one["artifactType"] == kind]
        raw = [json.loads(self.skopeo("--raw", image=f"{repository}@{one}")) for one in found]
        return [layer["digest"] for one in raw for layer in one["layers"]]

    def tags(self) -> list[str]:
        done = subprocess.run(
            ["skopeo", "list-tags", "--tls-verify=false", f"docker://{self.proxy.upstream}/tuned"],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        found = json.loads(done.stdout)["Tags"] if done.returncode == 0 else []
        return [tag for tag in found if not tag.startswith(("sha256-", "inputs-"))]


@pytest.fixture(scope="module")
def shop(client: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    if os.geteuid() != 0:
        pytest.skip("a private engine needs root")
    from pipeline.daemon import at_address, connect, private
    from pipeline.home import cache_home

    release_debian.ensure("docker-registry", "skopeo", "cosign")
    folder = tmp_path_factory.mktemp("shop")
    home = folder / "home" / "tuned-image-pipeline"
    home.mkdir(parents=True)
    (cache_home() / "wheels").mkdir(parents=True, exist_ok=True)
    (home / "wheels").symlink_to(cache_home() / "wheels")
    (folder / "release.toml").write_text(MATRIX)
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "home"), "COSIGN_PASSWORD": PASSWORD}
    subprocess.run(["cosign", "generate-key-pair"], cwd=folder, env=env, check=True, capture_output=True, timeout=300)
    at = private.folders(home)
    with ExitStack() as stack:
        private.start(at, "containerd")
        stack.callback(private.stop, at)
        with closing(connect(at_address(at.host, "private"))) as own:
            _lend_base(client, own, folder / "base.tar")
        registry = stack.enter_context(running(folder / "registry"))
        proxy = stack.enter_context(Proxy(registry.host))
        yield Shop(folder, proxy, {**env, "DOCKER_HOST": at.host})


def _lend_base(client: Any, own: Any, archive: Path) -> None:
    """Give the own engine the base that the other one has; without one it makes its own."""
    from pipeline.image import base
    from pipeline.versions import load

    versions = load(ROOT)
    bootstrapped = base._reference(base.BASE_NAME, versions["DEBIAN_SUITE"])
    found = base.find(client, versions["BASE_IMAGE"], "present") or base.find(client, bootstrapped, "bootstrapped")
    if found is None:
        return
    with archive.open("wb") as stream:
        for chunk in client.images.get(found.reference).save(named=found.reference):
            stream.write(chunk)
    with archive.open("rb") as stream:
        own.images.load(stream)
    archive.unlink()


@pytest.fixture(scope="module")
def released(shop: Shop) -> Ran:
    """The first release, killed while it pushed, and run again."""
    fault = shop.proxy.fail(method="PUT", path="/blobs/uploads/", wait=2.0)
    killed = shop.start()
    deadline = time.monotonic() + 1500
    while not fault.hits and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fault.hits, killed.communicate(timeout=300)[1]
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=300)
    shop.proxy.faults.clear()
    assert shop.tags() == [], "nothing half-published"
    return shop.release()


def test_a_killed_release_goes_on_and_a_failing_cell_stops_no_other(shop: Shop, released: Ran) -> None:
    assert "tune on" not in released.stderr, "what was tuned is not tuned again"
    assert "replay on" not in released.stderr, "what was replayed is not replayed again"
    assert released.cell["status"] == "pushed", released.stderr
    failed = released.told["cells"][1]
    assert (failed["status"], failed["code"]) == ("failed", 7)
    assert "nowhere is not a directory" in failed["why"]
    assert released.status == 7, "the code of the one cell that failed"
    assert "127.0.0.1" in released.stderr and "1 pushed, 1 failed" in released.stderr
    assert [released.cell["image"].rpartition(":")[2]] == shop.tags()
    tag = [one.path for one in shop.written() if "/manifests/tiny-" in one.path]
    assert [one.path for one in shop.written()][-1:] == tag, "the tag is the last thing that is written"


def test_what_was_pushed_can_be_trusted(shop: Shop, released: Ran) -> None:
    image = released.cell["image"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "attestation", "verify", image, "--key", str(shop.folder / "cosign.pub"), "--json"],
        cwd=ROOT, env=shop.env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert {one["state"] for one in told["checks"]} == {"ok"}
    assert told["digest"] == released.cell["digest"]
    notes = json.loads(shop.skopeo("--raw", image=image))["annotations"]
    assert notes["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert len(notes["org.opencontainers.image.revision"]) >= 40
    assert notes["io.github.tuned-image-pipeline.inputs"]


def test_a_finished_release_is_skipped_writes_nothing_and_needs_no_engine(shop: Shop, released: Ran) -> None:
    away = Shop(shop.folder, shop.proxy, {**shop.env, "DOCKER_HOST": "unix:///nowhere/docker.sock"})
    again = away.release("--cell", "tiny-tp1")
    assert (again.status, again.cell["status"]) == (0, "released"), again.stderr
    assert again.cell["digest"] == released.cell["digest"]
    assert shop.written() == []
    assert "→" not in again.stderr, "no step was taken"
    (shop.folder / "home" / "tuned-image-pipeline" / "releases").rename(shop.folder / "forgotten")
    fresh = away.release("--dry-run", "--floating-tag", "latest-{model}-tp{tp}")
    assert fresh.cell["status"] == "released", "a host that knows nothing finds it by its inputs"
    assert shop.tags() == [released.cell["image"].rpartition(":")[2]], "a dry run moves nothing"
    cells = away.release(action="cells").told
    assert [(one["name"], one["released"], bool(one["error"])) for one in cells] == [
        ("tiny-tp1", True, False), ("tiny-tp2-other", False, True),
    ]  # fmt: skip
    finished = away.release("--floating-tag", "latest-{model}-tp{tp}", action="finish")
    assert finished.status == 7 and finished.told["tags"] == ["latest-tiny-tp1"]


def test_a_retuned_image_pushes_its_cache_and_no_tag_is_moved(shop: Shop, released: Ran) -> None:
    fault = shop.proxy.fail(method="POST", path="/blobs/uploads/", status=405)
    reading = shop.release("--retune", "--cell", "tiny-tp1")
    shop.proxy.faults.remove(fault)
    assert (reading.status, reading.cell["status"]) == (8, "failed")
    assert "tune on" not in reading.stderr and "may be pushed to" in reading.cell["why"], "told before any work"
    pushed = shop.release("--retune", "--cell", "tiny-tp1", "--tag", "{model}-{key}-{cache}")
    assert pushed.cell["status"] == "pushed", pushed.stderr
    both = {pushed.cell["image"].rpartition(":")[2], released.cell["image"].rpartition(":")[2]}
    assert both <= set(shop.tags())
    repository, digest = pushed.cell["image"].rpartition(":")[0], pushed.cell["digest"]
    manifest = shop.manifest(f"{repository}@{digest}")
    layers = [layer["digest"] for layer in manifest["layers"]]
    sent = {unquote(one.path).rpartition("digest=")[2]: one.size for one in shop.written() if "digest=" in one.path}
    assert [layer for layer in layers if layer in sent] == layers[-1:], "of the layers the cache alone travels"
    assert manifest["config"]["digest"] in sent
    beside = [digest for kind in (AUTOTUNE, CYCLONEDX) for digest in shop.attached(pushed.cell, kind)]
    grows = sum(sent[digest] for digest in (layers[-1], *beside))
    assert sum(one.size for one in shop.sent()) - grows < FIXED, sent
    refused = shop.release("--cell", "tiny-tp1")  # under the tag of the first one
    assert (refused.cell["status"], refused.cell["code"]) == ("failed", 8)
    assert "a tag is never moved" in refused.cell["why"]
    assert shop.sent() == []


def test_layers_can_be_zstd(shop: Shop, released: Ran) -> None:
    """Of the same warm-up: another annotation makes it another release, so that nothing is tuned for it."""
    matrix = shop.folder / "zstd.toml"
    matrix.write_text(MATRIX.replace("Apache-2.0", "MIT"))
    words = ("--cell", "tiny-tp1", "--tag", "zstd-{cache}", "--compression", "zstd", "--matrix", str(matrix))
    done = shop.release(*words)
    assert done.cell["status"] == "pushed" and "tune on" not in done.stderr, done.stderr
    manifest = shop.manifest(f"{done.cell['image'].rpartition(':')[0]}@{done.cell['digest']}")
    assert {layer["mediaType"].rpartition("+")[2] for layer in manifest["layers"]} == {"zstd"}


def test_the_classic_store_is_refused_before_anything_is_built(shop: Shop, engine: Any) -> None:
    if engine.containerd_store:
        pytest.skip("the engine of this host has the containerd store itself")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "release", "run", "tiny", "--registry", shop.proxy.host],
        cwd=ROOT, env={**shop.env, "DOCKER_HOST": engine.host}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 4
    assert "classic store" in done.stderr and "containerd" in done.stderr


CELL = """
[[cells]]
model = "tiny"
tp = 1
device = "cpu"
ops = ["o"]
compare = "off"
buckets = [{number}]
name = "n{number}"
"""


@pytest.fixture
def slurm(shop: Shop, tmp_path: Path) -> Iterator[Slurm]:
    with cluster(tmp_path / "slurm", shop.env) as one:
        yield one


@pytest.mark.large  # minutes; tests/release/test_release_slurm.py runs a real Slurm each time
@pytest.mark.parametrize("number", [2, 12])
def test_slurm_releases_each_cell_once_whatever_happens(shop: Shop, slurm: Slurm, tmp_path: Path, number: int) -> None:
    """One cell is preempted, one meets a registry that is away, and `finish` comes too early: examples/slurm as it is."""
    counts = range(16 * number, 17 * number)  # of tokens: no cell is another test's
    names = [f"tiny-tp1-n{count}" for count in counts]
    (tmp_path / "release.toml").write_text("".join(CELL.format(number=count) for count in counts))
    repository = f"{shop.proxy.host}/tuned"
    shop.proxy.seen.clear()
    work, (array, last) = slurm.submit(tmp_path / "release.toml", {"REGISTRY": repository})
    first = f"{array}_1"
    log = work / f"cell-{first}.log"  # made a moment after the job is called running
    slurm.until(lambda: slurm.queue()[first][0] == "RUNNING" and log.exists() and "→ tune on" in log.read_text(), 600)
    slurm.call("sbatch", "--wait", "--partition=urgent", "--nodelist", slurm.job(first)["BatchHost"], "--wrap=true")
    assert first in slurm.queue(), "preempted, and queued again"
    slurm.call("env", "-C", ROOT, "bash", EXAMPLES / "finish.sbatch", env={"WORK": str(work)}, fails=True)
    told = json.loads((work / "summary.json").read_text())
    failed = {row["cell"]: row["why"] for row in told["cells"] if row["status"] == "failed"}
    assert (told["exit_code"], failed[names[0]]) == (8, "it has no result in the registry")

    def logs() -> str:
        return "".join(path.read_text() for path in work.glob("cell-*.log"))

    away = shop.proxy.fail(method="PATCH|PUT", path="/blobs/uploads/", status=503)
    slurm.until(lambda: "503" in logs(), 900)  # until a cell gives up
    shop.proxy.faults.remove(away)
    slurm.wait(900)
    assert "PREEMPTION" in logs()
    told = json.loads((work / "summary.json").read_text())
    assert [(row["cell"], row["status"]) for row in told["cells"]] == [(name, "released") for name in names]
    assert (slurm.job(last)["JobState"], slurm.job(last)["Restarts"]) == ("COMPLETED", "0")
    assert logs().count(" 1 pushed") == number, "each cell once"
    requests = (shop.folder / "registry" / "registry.log").read_text()
    stored = re.findall(r'"PUT /v2/tuned/(?:blobs/\S*digest=(\S+)|manifests/(tiny\S+)) HTTP/1.1" 201', requests)
    assert [one for one, times in Counter(stored).items() if times > 1] == [], "nothing is pushed twice"
    assert len(slurm.submit(tmp_path / "release.toml", {"REGISTRY": repository})[1]) == 1, "only a finish is left to do"
    slurm.wait(300)
