"""`pipeline versions check`, cold: with byte code of our modules, and without."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pipeline

from .measure import Figures, many, say

_PIPELINE = (sys.executable, "-m", "pipeline")

# What a user has: Python writes the byte code of modules at their first import. Empty is as good as not set.
_USER = {"PYTHONDONTWRITEBYTECODE": ""}


def without_byte_code(folder: Path) -> Figures:
    """The check by a copy of our modules that nobody has imported yet, nor will: each run compiles them."""
    package = Path(pipeline.__file__).parent
    shutil.copytree(package, folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from pipeline.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "versions", "check", "--root", str(package.parent)]
    return many(command, runs=15, env={"PYTHONDONTWRITEBYTECODE": "1"})


def main() -> None:
    """Print medians."""
    say("pipeline versions check, cold", many([*_PIPELINE, "versions", "check"], runs=15, env=_USER))
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as folder:
        say("pipeline versions check, cold, no byte code of ours", without_byte_code(Path(folder)))
    say("python -c pass", many([sys.executable, "-c", "pass"], runs=15))


if __name__ == "__main__":
    main()
