"""What the tests of a real vLLM share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "servers-test/tiny:1"
# One layer: all layers are compiled, and a compiled graph is loaded, in the same way.
ARGS = """--model /mnt/models --max-model-len 512 --max-num-seqs 8 --hf-overrides '{"num_hidden_layers": 1}'"""
Pipeline = Callable[..., "subprocess.CompletedProcess[str]"]
