"""The final table of `pipeline build`, and the line to try the image."""

from __future__ import annotations

import shlex
import sys

from pipeline import log
from pipeline.cache.otherkeys import OTHERS
from pipeline.contract.verdict import Verdict

from .road import Outcome


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def verified(verdict: Verdict) -> str:
    """What a verdict says, in one line."""
    if verdict.level != "replay":
        return "static only: NOT REPLAYED on the device of the caches"
    checks = verdict.checks
    if "replayed calls" not in checks:
        return ", ".join(f"{name} {count}" for name, count in checks.items()) or verdict.level
    others = checks.get("calls as others ask", 0)
    more = f", and {checks.get('hits as others ask', 0)} of {others} for {OTHERS}" if others else ""
    return f"replay: {checks.get('hits', 0)} of {checks['replayed calls']} calls hit{more}"


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Label and value, in the order in which they are shown."""
    done = outcome.finished
    table = [("image", outcome.image), ("size", size(outcome.size))]
    for manifest in done.manifests:
        entries = ", ".join(f"{op} {count}" for op, count in manifest.entries_per_op().items())
        table += [("key", manifest.key), ("entries", f"{entries} ({len(manifest.ranks)} ranks)")]
    if not done.manifests:
        table += [(one.kind, f"{one.path}, {size(one.bytes)}") for one in done.warm.caches]
    seconds = f"{done.warm.seconds:.1f} s" if done.warm.seconds else "imported: tuned elsewhere"
    if done.reused and done.warm.seconds:
        seconds += ", in the store already: not done again"
    return [
        *table,
        ("warm-up", seconds),
        ("verified", verified(done.verdict)),
        ("last layer", done.verdict.cache_diff_id),
        ("identity", done.verdict.identity),
    ]


def show(outcome: Outcome) -> None:
    """Draw the table and the `docker run` line on stderr."""
    table = rows(outcome)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(show_header=False, box=None, pad_edge=False)
        drawn.add_column(style="bold")
        drawn.add_column(overflow="fold")
        for label, value in table:
            drawn.add_row(label, value)
        Console(stderr=True).print(drawn)
    else:
        for label, value in table:
            log.line(f"{label:<14} {value}")
    first = next(iter(outcome.finished.manifests), None)
    if first is not None and first.substitutions:
        log.line("note: tuned on CPU ranks, which prove the pipeline; a CPU cache is of no use to a GPU")
    inputs = outcome.finished.inputs
    gpus = ["--gpus", "all"] if inputs.producer.device == "cuda" else []
    host = "" if outcome.docker_host == "unix:///var/run/docker.sock" else f"DOCKER_HOST={outcome.docker_host} "
    options, words = inputs.producer.shown(inputs.base.config.get("Entrypoint") or ())
    command = ["docker", "run", "--rm", *gpus, *options, outcome.image, *words]
    log.line(f"try it: {host}{shlex.join(command)}")
