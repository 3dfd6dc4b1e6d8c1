"""`python -m bench [NAME…]`: run every benchmark, or those that are named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py") if p.stem not in {"measure", "bare_tune"})

for name in sys.argv[1:] or NAMES:
    print(f"== {name}", flush=True)
    importlib.import_module(f"bench.{name}").main()
