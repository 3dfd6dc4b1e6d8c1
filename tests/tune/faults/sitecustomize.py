"""Faults for tests: Python imports this at start when its directory is on PYTHONPATH.

PIPELINE_TEST_FAULT names a function of one of the modules `faults_of_…` beside this file; it runs in the rank
PIPELINE_TEST_RANK (`*`: in each), right after the module that it wants to break was imported. The product knows nothing
of it.
"""

import importlib
import os
import sys

_MODULES = ("faults_of_ranks", "faults_of_tactics", "faults_of_judging")

_fault, _rank = os.environ.get("PIPELINE_TEST_FAULT"), os.environ.get("PIPELINE_TEST_RANK", "1")
if os.environ.get("PIPELINE_TEST_WARM"):  # warm.py: processes are forked, not started
    sys.executable = os.environ["PIPELINE_TEST_WARM"]
if _fault and "RANK" in os.environ and _rank in (os.environ["RANK"], "*"):
    (_found,) = (module for module in map(importlib.import_module, _MODULES) if hasattr(module, _fault))
    getattr(_found, _fault)()
