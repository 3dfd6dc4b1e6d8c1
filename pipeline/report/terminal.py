"""The summary of `pipeline build`: where the image is, what verify hit, what it cost, and how to run it. On stderr."""

from __future__ import annotations

import sys

from pipeline import log
from pipeline.cache.otherkeys import OTHERS
from pipeline.contract.verdict import Verdict
from pipeline.image.road import Outcome

from . import run
from .facts import Facts
from .page import size


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


def rows(outcome: Outcome, facts: Facts, report: str) -> list[tuple[str, str]]:
    """Label and value, in the order in which they are shown."""
    done = outcome.finished
    table = [("image", f"{facts.image} ({size(facts.size)})")]
    for manifest in done.manifests:
        entries = ", ".join(f"{op} {count}" for op, count in manifest.entries_per_op().items())
        table += [("key", manifest.key), ("entries", f"{entries} ({len(manifest.ranks)} ranks)")]
    table += [(one.kind, f"{size(one.bytes)}{f', {one.result}' if one.result else ''}") for one in facts.caches]
    table += [
        (f"start, {name}", f"{seconds['ready']:.1f} s") for name, seconds in facts.starts.items() if "ready" in seconds
    ]
    seconds = f"{done.warm.seconds:.1f} s" if done.warm.seconds else "imported: tuned elsewhere"
    if done.reused and done.warm.seconds:
        seconds += ", from the store"
    steps = ", ".join(f"{name} {took:.1f}" for name, took in outcome.steps)
    return [
        *table,
        ("warm-up", seconds),
        ("verified", verified(done.verdict)),
        ("cost", f"{sum(took for _, took in outcome.steps):.1f} s: {steps}"),
        ("last layer", done.verdict.cache_diff_id),
        ("identity", done.verdict.identity),
        *([("report", report)] if report else []),
    ]


def show(outcome: Outcome, facts: Facts, report: str) -> None:
    """Draw the table, and how to run the image."""
    table = rows(outcome, facts, report)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(show_header=False, box=None, pad_edge=False)
        drawn.add_column(style="bold")
        drawn.add_column(overflow="fold")
        for label, value in table:
            drawn.add_row(label, value)
        Console(stderr=True, highlight=False).print(drawn)
    else:
        for label, value in table:
            log.line(f"{label:<20} {value}")
    if any(manifest.substitutions for manifest in outcome.finished.manifests):
        log.line("note: tuned on CPU ranks, which prove the pipeline; a CPU cache is of no use to a GPU")
    log.line(f"try it: {run.docker(facts, outcome.docker_host)}")
    log.line("in Kubernetes, in the pod's spec:")
    for line in run.kubernetes(facts).splitlines():
        log.line(f"    {line}")
