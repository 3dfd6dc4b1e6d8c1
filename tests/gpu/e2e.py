"""The whole pipeline on a GPU host with a real Docker Engine: image, verify, explain, and tuned again.

    python -m tests.gpu.e2e BASE_IMAGE OUT [--model MODEL] [--tp N] [--words '…']

BASE_IMAGE has FlashInfer, and torch or a runtime of the engine that puts it there. OUT/e2e.json is written after each
step; one step that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TUNED = "e2e/tuned:1"


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

    def run(self, name: str, *words: str, timeout: float = 900) -> None:
        """Run one command; note its exit code, seconds, JSON and the end of what it said."""
        began = time.monotonic()
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            self.put(name, {"status": "timeout", "seconds": timeout})
            return
        (self.out / f"{name}.log").write_text(done.stderr)
        told = json.loads(done.stdout) if done.stdout.strip().startswith("{") else done.stdout[-600:]
        seconds = round(time.monotonic() - began, 2)
        self.put(name, {"status": done.returncode, "seconds": seconds, "told": told, "said": done.stderr[-1500:]})


def main() -> None:
    """All steps in order."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.e2e")
    parser.add_argument("base", metavar="BASE_IMAGE")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tp", default="1", metavar="N", help="number of ranks")
    parser.add_argument("--words", default="", help="more words for every build, such as '--ops qkv --max-tokens 256'")
    options = parser.parse_args()
    record = Record(options.out)
    pipeline = (sys.executable, "-m", "pipeline")
    build = (*pipeline, "build", options.model, "--tp", options.tp, "--base-image", options.base,
             "--accept-base-versions", "--json", *options.words.split())  # fmt: skip
    record.run("build", *build, "--image", TUNED)
    record.run("again", *build, "--image", TUNED)
    record.run("verify", *pipeline, "verify", TUNED, "--json")
    record.run("explain", *pipeline, "explain", TUNED, "--live", "--json")
    record.run("layers", "docker", "history", "--no-trunc", "--format", "{{.Size}} {{.CreatedBy}}", TUNED)
    record.run("retune", *build, "--retune", "--image", "e2e/retuned:1")


if __name__ == "__main__":
    main()
