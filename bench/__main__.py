"""`python -m bench [NAME…]`: run every benchmark, or those that are named."""

from __future__ import annotations

import argparse
import importlib

NAMES = ("check", "image", "tune")

parser = argparse.ArgumentParser(prog="python -m bench", description="Figures of speed and memory.")
parser.add_argument("names", nargs="*", choices=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
for name in parser.parse_args().names or NAMES:
    print(f"== {name}", flush=True)
    importlib.import_module(f"bench.{name}").main()
