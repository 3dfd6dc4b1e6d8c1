"""`pipeline build tiny` again with nothing changed, beside the bare cached build of the same stages."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from bench.measure import many, once, say
from pipeline.daemon import ensure
from pipeline.daemon.buildx import environment
from pipeline.home import cache_home
from pipeline.image.caches import collect
from pipeline.image.contexts import stage_key

PIPELINE = [sys.executable, "-m", "pipeline"]
IMAGE = [*PIPELINE, "build", "tiny", "--tp", "2", "--image", "tuned-bench/tiny:bench", "--json"]


def main() -> None:
    """Measure, with whatever engine answers."""
    environ = environment(ensure())
    once(IMAGE)
    outcome = json.loads(subprocess.run(IMAGE, capture_output=True, text=True, check=True).stdout)
    built = next(line for line in Path(outcome["log"]).read_text().splitlines() if line.startswith("+ docker buildx"))
    words = shlex.split(built.removeprefix("+ "))
    place = cache_home() / "contexts" / "bench"
    root = next(p for p in (cache_home() / "tuned").glob("*/root") if (p / outcome["key"]).is_dir())
    if not place.exists():
        stage_key(collect([root])[0], place)
    words = [f"{word.partition('=')[0]}={place}" if word.startswith("tuned-") else word for word in words]
    at = words.index("--metadata-file")
    del words[at : at + 2]
    bare = many(words, env=environ)
    again = many(IMAGE)
    say("bare `docker buildx build` of the same stages, all cached", bare)
    say("`pipeline build tiny` again, nothing changed", again)
    say("  ratio of the medians (goal: at most 2)", f"{again.median / bare.median:.2f}")
    say("  peak memory of the host process (goal: under 200 MB)", f"{again.peak / 1e6:.0f} MB")
    say("`pipeline plan tiny`", many([*PIPELINE, "plan", "tiny"]))
    say(
        "`pipeline plan DeepSeek-V3 --tp 8 --ep 8 --arch 90a` (goal: under 0.2 s)",
        many([*PIPELINE, "plan", "DeepSeek-V3", "--tp", "8", "--ep", "8", "--arch", "90a"]),
    )
    say("`pipeline daemon status`", many([*PIPELINE, "daemon", "status"]))
    subprocess.run(["docker", "rmi", "tuned-bench/tiny:bench"], env=environ, check=False, capture_output=True)
