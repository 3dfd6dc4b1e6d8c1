"""The whole pipeline on a GPU host with a real engine: image, verify, entry point, and what a start costs.

    python -m tests.gpu.e2e BASE_IMAGE OUT [MODEL] [REPEATS]

BASE_IMAGE has FlashInfer, and torch or a runtime of the engine that puts it there. Everything that is found is written
to OUT as it is found; one step that fails does not stop the others. Variables:

    E2E_TP        the number of ranks (1)
    E2E_PLAN      words that say what is planned, such as `--ops qkv --max-tokens 256` for a quick try
    E2E_WORDS     more words for `pipeline build`
    E2E_TUNE_IN   where the first image is tuned (stage)
    E2E_BRIEF     if set, the step `stage` ends with the image
    E2E_STEPS     the steps to run (all), in this order:

    stage       tuned in a build stage; the same again; verify; entry point; explain --live
    container   tuned in a container
    start       from `docker run` to the end of a first pass: a tuned, c on defaults, b nothing baked, the floor
    block       with several ranks: the tensor-parallel block in the image, tuned, untuned, tuning at its start, and that
                with the modules gone too
    retune      the image tuned again, and its cache grafted onto an image that has none
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.places import CACHE_ROOT

ROOT = Path(__file__).resolve().parents[2]
FIRST_PASS = Path(__file__).with_name("first_pass.py")
BLOCK = Path(__file__).with_name("tp_block.py")
STEPS = ("stage", "container", "start", "block", "add")
# torchrun and its groups where nothing but the loopback interface is there, and the host's name has no address
HERE = ("--nnodes=1", "--master-addr=127.0.0.1", "--master-port=29511", "--local-addr=127.0.0.1")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
TUNED, BARE = "e2e/stage:1", "e2e/bare:1"


class Record:
    """Results by name, on disk after each."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.found: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        (self.out / "e2e.json").write_text(json.dumps(self.found, indent=1))
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {json.dumps(value)[:600]}", flush=True)


def pipeline(record: Record, name: str, *words: str, timeout: float = 420) -> dict[str, Any] | None:
    """Run one command of ours; keep its stderr as a log, and its JSON."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr or ""  # bytes, whatever `text` is, in Python 3.11 and 3.12
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        record.put(name, {"timeout": timeout, "stderr": said[-1500:]})
        return None
    seconds = round(time.monotonic() - began, 2)
    (record.out / f"{name}.log").write_text(done.stderr)
    told = json.loads(done.stdout) if done.stdout.strip().startswith("{") else None
    record.put(name, {"command": words, "status": done.returncode, "wall": seconds, "outcome": told})
    if done.returncode != 0:
        print(done.stderr[-3000:], flush=True)
    return told if done.returncode == 0 else None


def folder(*files: Path) -> bytes:
    """A tar of files, for put_archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in files:
            tar.add(path, arcname=path.name)
    return buffer.getvalue()


def start(client: Any, image: str, words: list[str], files: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    """One container from the start call to its last line, which is JSON; seconds."""
    container = client.containers.create(image, words, network_mode="none", shm_size="1g", **options)
    try:
        container.put_archive("/tmp", folder(*files))
        began = time.perf_counter()
        container.start()
        status = container.wait(timeout=400)["StatusCode"]
        wall = time.perf_counter() - began
        lines = container.logs(stdout=True, stderr=False).decode().strip().splitlines()
        if status != 0 or not lines:
            return {"status": status, "said": container.logs(tail=12).decode()[-1500:]}
        return {"wall": round(wall, 3), **json.loads(lines[-1])}
    finally:
        container.remove(force=True)


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the seconds of runs that ended well, beside all of them."""
    walls = [run["wall"] for run in runs if "wall" in run]
    return {"median": statistics.median(walls) if walls else None, "runs": runs}


class Host:
    """What the steps share: the engine, its GPUs, the words of every `pipeline build`."""

    def __init__(self, record: Record, base: str, model: str, repeats: int) -> None:
        from pipeline.daemon import connect, ensure
        from pipeline.home import cache_home
        from pipeline.image.base import find
        from pipeline.image.gpus import offered
        from pipeline.image.probe import probe
        from pipeline.image.session import Session

        self.record, self.model, self.repeats = record, model, repeats
        self.ranks = os.environ.get("E2E_TP", "1")
        self.planned = ["--tp", self.ranks, *os.environ.get("E2E_PLAN", "").split()]
        engine = ensure()
        self.client = connect(engine)
        session = Session(engine, self.client, cache_home(), Path("e2e.log"))
        there = find(self.client, base, "given")
        assert there is not None, f"there is no image {base}"
        _, self.gpus = probe(session, there, offered(engine))
        self.common = ("build", model, *self.planned, "--base-image", base, "--accept-base-versions", "--json",
                       *os.environ.get("E2E_WORDS", "").split())  # fmt: skip
        record.put("engine", {"version": engine.version, "access": self.gpus.access, "driver": self.gpus.driver,
                              "gpus": [gpu.name for gpu in self.gpus.gpus]})  # fmt: skip

    def stage(self) -> None:
        """Tuned in a RUN step, or where E2E_TUNE_IN says."""
        where = os.environ.get("E2E_TUNE_IN", "stage")
        made = pipeline(self.record, "stage", *self.common, "--tune-in", where, "--image", TUNED)
        if made is None:
            return
        layers = self.client.api.history(TUNED)
        self.record.put("layers", [[layer["Size"], layer["CreatedBy"][:80]] for layer in layers[:8]])
        if os.environ.get("E2E_BRIEF"):
            return
        pipeline(self.record, "again", *self.common, "--tune-in", where, "--image", TUNED)
        pipeline(self.record, "verify", "verify", TUNED, "--json")
        words = ["docker", "run", "--rm", "--network", "none", *self.gpus.words(), TUNED, "nvidia-smi", "-L"]
        said = subprocess.run(words, capture_output=True, text=True, check=False)
        found = {"status": said.returncode, "stdout": said.stdout[-300:], "stderr": said.stderr[-500:]}
        self.record.put("entry point", found)
        pipeline(self.record, "explain live", "explain", TUNED, "--live", "--json")

    def container(self) -> None:
        """Tuned in a container; the image of the stage is left alone."""
        words = ("--tune-in", "container", "--retune", "--image", "e2e/container:1")
        pipeline(self.record, "container", *self.common, *words)

    def start(self) -> None:
        """What a start of one rank costs, with the shapes that it holds, in each of the ways; b last, for it takes longest."""
        plan = self.record.out / "plan.json"
        words = ["plan", self.model, *self.planned, "--arch", self.gpus.gpus[0].arch, "--output", str(plan)]
        subprocess.run([sys.executable, "-m", "pipeline", *words], cwd=ROOT, check=True, capture_output=True)
        self._lay_out(self._bare())
        nothing = {"PIPELINE_AUTOTUNE_CACHE_DIR": "/nowhere"}
        floor: list[dict[str, Any]] = []
        found: dict[str, list[dict[str, Any]]] = {"a": [], "c": []}
        for _ in range(self.repeats):  # interleaved, so that a change of the host hits all alike
            for name, mode, environment in (("a", "tuned", {}), ("c", "default", nothing)):
                found[name].append(self._first(TUNED, mode, plan, environment))
            floor.append(self._floor(plan))
        self.record.put("a: tuned image", medians(found["a"]))
        self.record.put("c: modules and no cache, on defaults", medians(found["c"]))
        self.record.put("floor: a process outside", medians(floor))
        bare = [self._first(BARE, "tune", plan, nothing) for _ in range(self.repeats)]
        self.record.put("b: nothing baked, tuned at start", medians(bare))

    def _first(self, image: str, mode: str, plan: Path, environment: dict[str, str]) -> dict[str, Any]:
        words = ["python3", "/tmp/first_pass.py", mode, f"/tmp/{plan.name}"]
        return start(self.client, image, words, [FIRST_PASS, plan], {"environment": environment, **self.gpus.options()})

    def _bare(self) -> str:
        """Make the image without its cache and its compiled modules; where in the image those are."""
        where = "import os, flashinfer.jit.env as e; print(os.path.realpath(e.FLASHINFER_AOT_DIR))"
        options = self.gpus.options()
        said = self.client.containers.run(TUNED, ["python3", "-c", where], remove=True, network_mode="none", **options)
        aot = said.decode().split()[-1]
        made = subprocess.run(
            ["docker", "build", "--tag", BARE, "-"], text=True, capture_output=True, check=False,
            input=f"FROM {TUNED}\nRUN rm -rf {aot} {CACHE_ROOT}\n", env={**os.environ, "DOCKER_BUILDKIT": "0"},
        )  # fmt: skip
        self.record.put("image without cache and modules", {"status": made.returncode, "said": made.stderr[-300:]})
        return aot

    def _lay_out(self, aot: str) -> None:
        """The image's cache and compiled modules, for a process outside."""
        for source, target in ((aot, self._host_aot()), (CACHE_ROOT, "/tmp/e2e-cache")):
            subprocess.run(["mkdir", "-p", target], check=True)
            out = subprocess.run(["docker", "create", TUNED, "x"], capture_output=True, text=True, check=True)
            subprocess.run(["docker", "cp", f"{out.stdout.strip()}:{source}/.", target], check=False)
            subprocess.run(["docker", "rm", out.stdout.strip()], check=False, capture_output=True)

    @staticmethod
    def _host_aot() -> str:
        where = "import flashinfer.jit.env as e; print(e.FLASHINFER_AOT_DIR)"
        words = [sys.executable, "-c", where]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1]

    def _floor(self, plan: Path) -> dict[str, Any]:
        file = next(Path("/tmp/e2e-cache").rglob("autotune_configs.json"))
        words = [sys.executable, str(FIRST_PASS), "bare", str(plan), str(file)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "FLASHINFER_DISABLE_JIT": "1", "PYTHONPATH": path}
        began = time.perf_counter()
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
        if done.returncode != 0:
            return {"status": done.returncode, "said": done.stderr[-1500:]}
        return {"wall": round(wall, 3), **json.loads(done.stdout.splitlines()[-1])}

    def block(self) -> None:
        """The tensor-parallel block from the image, on all its ranks."""
        if self.ranks == "1":
            return
        nothing = {"PIPELINE_AUTOTUNE_CACHE_DIR": "/nowhere"}
        torchrun = ["python3", "-m", "torch.distributed.run", *HERE, f"--nproc-per-node={self.ranks}"]
        self._bare()
        ways = (
            ("tuned", TUNED, "tuned", {}),
            ("defaults", TUNED, "default", nothing),
            ("tuning", TUNED, "tune", nothing),
            ("nothing baked, tuning", BARE, "tune", nothing),
        )
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _, _ in ways}
        for _ in range(min(3, self.repeats)):  # in turn, so that a change of the host hits all alike
            for name, image, mode, environment in ways:
                options = {"environment": {**environment, **LOOPBACK}, **self.gpus.options()}
                runs[name].append(start(self.client, image, [*torchrun, "/tmp/tp_block.py", mode], [BLOCK], options))
                self.record.put(f"block, {name}", medians(runs[name]))

    def add(self) -> None:
        """A cache for an image that has none."""
        if Path("/tmp/e2e-cache").exists():
            pipeline(
                self.record, "cache add", "cache", "add", BARE, "/tmp/e2e-cache", "--image", "e2e/grafted:1", "--json"
            )


def main(base: str, out: Path, model: str, repeats: int, steps: Sequence[str]) -> None:
    """The chosen steps, in order."""
    record = Record(out)
    host = Host(record, base, model, repeats)
    for name in steps:
        try:
            getattr(host, name)()
        except Exception as error:  # noqa: BLE001 - one step that fails does not stop the others
            record.put(f"{name} failed", repr(error)[-1500:])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.e2e", epilog="variables: see this file's first lines")
    parser.add_argument("base", metavar="BASE_IMAGE")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("model", nargs="?", default="llama-3.1-8b", metavar="MODEL")
    parser.add_argument("repeats", nargs="?", type=int, default=5, metavar="REPEATS")
    options = parser.parse_args()
    asked = os.environ.get("E2E_STEPS", " ".join(STEPS)).split()
    if unknown := [name for name in asked if name not in STEPS]:
        parser.error(f"E2E_STEPS: no step {', '.join(unknown)} (there are {', '.join(STEPS)})")
    main(options.base, options.out, options.model, options.repeats, [name for name in STEPS if name in asked])
