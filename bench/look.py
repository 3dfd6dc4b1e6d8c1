"""What an image's last layer holds, by the engine's export and by a push to ourselves: `IMAGE=… python -m bench look`.

The engine that answers must have the containerd store and the image.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time

from bench.measure import say
from pipeline.daemon import connect, ensure
from pipeline.daemon.look import Look
from pipeline.image.identity import identify

RUNS = 3


def main() -> None:
    """Measure both in turn; what they say must be the same."""
    engine, image = ensure(), os.environ.get("IMAGE", "")
    if engine.look is not Look.PUSHED or not image:
        say("not measured", "IMAGE must name an image of a local engine that has the containerd store")
        return
    taken: dict[Look, list[float]] = {Look.EXPORTED: [], Look.PUSHED: []}
    with contextlib.closing(connect(engine)) as client:
        seen = set()
        for _ in range(RUNS):
            for look, seconds in taken.items():
                began = time.perf_counter()
                seen.add(identify(client, image, count=1, look=look))
                seconds.append(time.perf_counter() - began)
    if len(seen) != 1:
        sys.exit(f"they differ: {seen}")
    for what, seconds in (("export", taken[Look.EXPORTED]), ("push to ourselves", taken[Look.PUSHED])):
        low, high = min(seconds), max(seconds)
        say(what, f"{statistics.median(seconds):.2f} s (min {low:.2f}, max {high:.2f}, n={RUNS})")
