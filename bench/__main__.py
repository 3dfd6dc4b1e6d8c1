"""`python -m bench [NAME…]`: run every benchmark, or those that are named."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py") if p.stem not in {"measure", "bare_tune"})

parser = argparse.ArgumentParser(prog="python -m bench", description="Figures of speed and memory.")
parser.add_argument("names", nargs="*", choices=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
for name in parser.parse_args().names or NAMES:
    print(f"== {name}", flush=True)
    importlib.import_module(f"bench.{name}").main()
