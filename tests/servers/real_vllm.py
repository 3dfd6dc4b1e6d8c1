"""What the tests of a real vLLM share."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = f"servers-test-{secrets.token_hex(4)}"  # the first part of names: two runs of these tests can share one engine
IMAGE = f"{OWN}/tiny:1"
# One layer: all layers are compiled, and a compiled graph is loaded, in the same way.
ARGS = """--model /mnt/models --max-model-len 512 --max-num-seqs 8 --hf-overrides '{"num_hidden_layers": 1}'"""
Pipeline = Callable[..., "subprocess.CompletedProcess[str]"]
