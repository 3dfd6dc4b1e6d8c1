"""What the tests of a real vLLM share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "servers-test/tiny:1"
Pipeline = Callable[..., "subprocess.CompletedProcess[str]"]
