"""`pipeline build tiny` again with nothing changed, beside the bare `docker buildx build` that it ran."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from bench.measure import many, say
from pipeline.daemon import ensure
from pipeline.daemon.buildx import environment

IMAGE = "tuned-bench/tiny:bench"
BUILD = (sys.executable, "-m", "pipeline", "build", "tiny", "--tp", "2", "--image", IMAGE, "--json")


def main() -> None:
    """Measure, with whatever engine answers."""
    environ = environment(ensure())
    subprocess.run(BUILD, check=True, stdout=subprocess.DEVNULL)
    outcome = json.loads(subprocess.run(BUILD, capture_output=True, text=True, check=True).stdout)
    lines = Path(outcome["log"]).read_text(encoding="utf-8").splitlines()
    words = shlex.split(next(line for line in reversed(lines) if line.startswith("+ docker buildx build"))[2:])
    if "--metadata-file" in words:  # in a folder that is gone
        at = words.index("--metadata-file")
        del words[at : at + 2]
    bare = many(words, env=environ)
    again = many(BUILD)
    say("bare `docker buildx build` of the same target, all cached", bare)
    say("`pipeline build tiny` again, nothing changed", again)
    say("  ratio of the medians (goal: at most 2)", f"{again.median / bare.median:.2f}")
    say("  peak memory of the host process (goal: under 200 MB)", f"{again.peak / 1e6:.0f} MB")
    subprocess.run(["docker", "rmi", IMAGE], env=environ, check=False, capture_output=True)
