"""`python3 /tuner/launcher.py pipeline.tune… ARGUMENTS`: run a module of the package that lies beside this file.

Python puts this file's folder on its search path, so that nothing is installed and no PYTHONPATH is set in the image.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
