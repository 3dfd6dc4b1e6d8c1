"""FlashInfer's modules that a server's image has baked, asked of FlashInfer itself: its own rule where to look for them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tune_harness import ROOT, Tuner

from pipeline.servers import at_start

LOOK = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import at_start
import flashinfer.jit.env as env
from flashinfer.jit.quantization import gen_quantization_module
from flashinfer.jit.sampling import gen_sampling_module
env.FLASHINFER_AOT_DIR = type(env.FLASHINFER_AOT_DIR)(sys.argv[1])
found = {}
for one in (gen_sampling_module(), gen_quantization_module()):
    module = pathlib.Path(sys.argv[1], one.name, one.name + ".so")
    module.parent.mkdir()
    module.touch()
    found[one.name] = one.is_aot
print(json.dumps(found))
"""


def test_flashinfer_finds_no_baked_module_on_another_architecture(tuner: Tuner, tmp_path: Path) -> None:
    baked = tmp_path / "modules.json"
    baked.write_text(json.dumps({"arch": "90a", "names": ["sampling"]}))
    code = (ROOT / "pipeline" / "servers" / "at_start.py").read_text()
    (tmp_path / "at_start.py").write_text(code.replace(at_start.MODULES, str(baked)))
    environment = {**tuner.environment(), "FLASHINFER_CUDA_ARCH_LIST": "10.0a"}
    words = [tuner.python, "-c", LOOK, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"sampling": False, "quantization": True}
