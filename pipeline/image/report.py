"""The final table of `pipeline image`, and the line to try the image."""

from __future__ import annotations

import shlex
import sys

from .outcome import Outcome


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Label and value, in the order in which they are shown."""
    manifest = outcome.manifest
    tuned = f"{outcome.tune_seconds:.1f} s on {len(manifest.ranks)} ranks"
    if outcome.reused:
        tuned += ", taken from the store: not tuned again"
    checks = outcome.verdict.checks
    return [
        ("image", outcome.image),
        ("size", _size(outcome.size)),
        ("key", outcome.key),
        ("entries", ", ".join(f"{op} {n}" for op, n in manifest.entries_per_op().items())),
        ("tune time", tuned),
        (
            "verified",
            f"{outcome.verdict.level}: {checks.get('hits', 0)} of {checks.get('replayed calls', 0)} calls hit",
        ),
        ("cache layer", outcome.cache_diff_id),
        ("config digest", outcome.config_digest),
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
            sys.stderr.write(f"{label:<14} {value}\n")
    if outcome.manifest.substitutions:
        sys.stderr.write("note: tuned on CPU ranks, which prove the pipeline; a CPU cache is of no use to a GPU\n")
    host = "" if outcome.docker_host == "unix:///var/run/docker.sock" else f"DOCKER_HOST={outcome.docker_host} "
    command = ["docker", "run", "--rm", outcome.image, "python3", "-m", "pipeline.tune.replay", "--key", outcome.key]
    sys.stderr.write(f"try it: {host}{shlex.join(command)}\n")
