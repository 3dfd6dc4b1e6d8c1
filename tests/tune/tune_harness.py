"""Running the product's modules in an interpreter that has torch and FlashInfer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Done:
    """How a process ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def told(self) -> Any:
        """The JSON object on stdout."""
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Tuner:
    """An interpreter with torch and FlashInfer, and the record it prints."""

    python: str
    path: str
    workspace: Path
    shim: str = ""  # stands in for the interpreter: warm.py

    def run(self, module: str, *words: object, fault: str = "", rank: object = 1, warm: bool = True) -> Done:
        """Run a module of the product to its end. Unless `warm`, every process imports for itself."""
        if module == "pipeline.tune" and "--compare" not in words:
            words = (*words, "--compare", "off")  # comparing takes its time on purpose, and has tests of its own
        done = subprocess.run(
            [self.python, "-m", module, *map(str, words)],
            env=self.environment(fault, rank, warm=warm),
            capture_output=True,
            text=True,
            timeout=600,  # seconds: it ends, also on a machine that has much else to do
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def environment(self, fault: str = "", rank: object = 1, *, warm: bool = False) -> Mapping[str, str]:
        warm = warm and bool(self.shim)
        path = [self.path] * bool(self.path) + [str(ROOT), str(HERE)]
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path),
            "FLASHINFER_WORKSPACE_BASE": str(self.workspace),
            **({"PIPELINE_TUNE_TEST_HOOKS": str(HERE / "faults.py")} if fault or warm else {}),
            "PIPELINE_TEST_FAULT": fault,
            "PIPELINE_TEST_RANK": str(rank),
            **({"PIPELINE_TEST_WARM": self.shim} if warm else {}),
        }

    def record(self) -> Any:
        """The environment record."""
        done = self.run("pipeline.tune.record")
        assert done.status == 0, done.stderr
        return done.told["record"]


def write_plan(plan: Plan, path: Path) -> Path:
    path.write_text(json.dumps(plan.to_json()))
    return path


def only_key(root: Path) -> Path:
    (place,) = root.glob("*/*/*")
    return place


def read_manifest(root: Path) -> Manifest:
    return Manifest.from_json(json.loads((only_key(root) / "manifest.json").read_text()))


def error_line(done: Done) -> str:
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))
