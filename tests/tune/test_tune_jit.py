"""Compiling: what was built before the tuning is not built again on loading, nor by the next tuning."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tune_harness import Tuner, write_plan

from pipeline.contract.plan import Plan

pytestmark = pytest.mark.flashinfer

COMPILER = """#!/bin/sh
out=; dep=; src=
while [ $# -gt 0 ]; do case "$1" in -o) out=$2; shift;; -MF) dep=$2; shift;; -c) src=$2; shift;; esac; shift; done
echo "$out" >> "$RAN"
[ -n "$dep" ] && echo "$out: $src" > "$dep"
echo x > "$out"
"""

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import flashinfer.jit.core as core
from pipeline.tune.jit import build_all
place, ran = Path(sys.argv[1]), Path(os.environ["RAN"])
(place / "a.cu").write_text("")

def module(name):
    return core.JitSpecNvcc(name=name, sources=[place / "a.cu"], extra_cflags=[], extra_cuda_cflags=[],
                            extra_ldflags=None, extra_include_dirs=None, needs_device_linking=False)

def runs():
    count = len(ran.read_text().splitlines()) if ran.exists() else 0
    ran.unlink(missing_ok=True)
    return count

modules, found = [module("one"), module("two")], []
for _ in range(2):
    build_all(modules)
    found.append(runs())
    for one in modules:
        one.build(verbose=False)
    found.append(runs())
    time.sleep(0.05)
print(json.dumps(found))
"""


def test_a_module_is_compiled_once(tuner: Tuner, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"  # asked for its version alone
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    environment = {
        **tuner.environment(),
        "PATH": f"{Path(tuner.python).parent}:{os.environ['PATH']}",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_NVCC": str(compiler),
        "CXX": str(compiler),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "RAN": str(tmp_path / "ran"),
    }
    done = subprocess.run(
        [tuner.python, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [4, 0, 0, 0]  # two objects and two libraries, and nothing ever after


@pytest.mark.once
def test_modules_are_compiled_alone_for_an_image(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """A plan for a CPU loads none; one with a GPU's modules is compiled in tests/docker."""
    done = tuner.run("pipeline.tune.jit", write_plan(make_plan(), tmp_path / "plan.json"), tmp_path / "out")
    assert (done.status, done.told) == (0, {"modules": []})
    done = tuner.run("pipeline.tune.jit", tmp_path / "none.json", tmp_path / "out")
    assert done.status == 2
    assert "none.json" in done.stderr
