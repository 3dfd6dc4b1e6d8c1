"""The whole pipeline on a GPU host with a real engine: image, verify, entry point, and what a start costs.

    python -m tests.gpu.e2e BASE_IMAGE OUT [MODEL] [REPEATS]

BASE_IMAGE has torch and FlashInfer, or the engine's runtime puts them there. Everything that is found is written to OUT
as it is found; one step that fails does not stop the others.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST_PASS = Path(__file__).with_name("first_pass.py")


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
        record.put(name, {"timeout": timeout, "stderr": (error.stderr or b"")[-1500:].decode(errors="replace")})
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


def start(client: Any, image: str, mode: str, plan: Path, gpus: Any, environment: dict[str, str]) -> dict[str, Any]:
    """One container from `docker run` to the end of its first pass; seconds from the start call to its last line."""
    command = ["python3", "/tmp/first_pass.py", mode, f"/tmp/{plan.name}"]
    container = client.containers.create(image, command, environment=environment, network_mode="none", **gpus.options())
    try:
        container.put_archive("/tmp", folder(FIRST_PASS, plan))
        began = time.perf_counter()
        container.start()
        status = container.wait(timeout=400)["StatusCode"]
        wall = time.perf_counter() - began
        lines = container.logs(stdout=True, stderr=False).decode().strip().splitlines()
        if status != 0:
            return {"status": status, "said": container.logs(tail=8).decode()[-800:]}
        return {"wall": round(wall, 3), **json.loads(lines[-1])}
    finally:
        container.remove(force=True)


def main(base: str, out: str, model: str = "llama-3.1-8b", repeats: int = 5) -> None:
    """Everything, in order of worth."""
    from pipeline.engine import connect, ensure
    from pipeline.image.facts import probe
    from pipeline.image.gpus import offered

    record = Record(Path(out))
    engine = ensure()
    client = connect(engine)
    _, gpus = probe(client, base, offered(engine))
    record.put("engine", {"version": engine.version, "access": gpus.access, "driver": gpus.driver,
                          "gpus": [gpu.name for gpu in gpus.gpus]})  # fmt: skip
    few = tuple(os.environ.get("E2E_WORDS", "").split())  # such as `--ops qkv --max-tokens 256`, for a quick try
    common = ("image", model, "--tp", "1", "--base-image", base, "--accept-base-versions", "--json", *few)
    stage = pipeline(record, "stage", *common, "--tune-in", "stage", "--image", "e2e/stage:1")
    if stage is not None:
        pipeline(record, "again", *common, "--tune-in", "stage", "--image", "e2e/stage:1")
    container = (
        None
        if os.environ.get("E2E_SKIP") == "container"
        else pipeline(record, "container", *common, "--tune-in", "container", "--retune", "--image", "e2e/container:1")
    )
    image = "e2e/stage:1" if stage is not None else "e2e/container:1"
    if stage is None and container is None:
        return
    pipeline(record, "verify", "verify", image, "--json")
    said = subprocess.run(
        ["docker", "run", "--rm", image, "nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    record.put("entry point", {"status": said.returncode, "stdout": said.stdout[-300:], "stderr": said.stderr[-500:]})
    plan = record.out / "plan.json"
    subprocess.run(
        [sys.executable, "-m", "pipeline", "plan", model, "--tp", "1", "--arch", gpus.gpus[0].arch, *few, "--out", str(plan)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    nothing = {"PIPELINE_AUTOTUNE_CACHE_DIR": "/nowhere"}
    for name, mode, environment, times in (
        ("a: tuned image", "tuned", {}, repeats),
        ("c: no cache, defaults", "default", nothing, repeats),
        ("b: no cache, tuning at start", "tune", nothing, 1),
    ):
        runs = [start(client, image, mode, plan, gpus, environment) for _ in range(times)]
        walls = [run["wall"] for run in runs if "wall" in run]
        record.put(name, {"median": statistics.median(walls) if walls else None, "runs": runs})


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(*sys.argv[1:4], *(int(word) for word in sys.argv[4:5]))
