"""The final table of `pipeline build`, and the line to try the image."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.cache.otherkeys import OTHERS
from pipeline.contract.manifest import Manifest
from pipeline.contract.verdict import Verdict

from .outcome import Outcome
from .wrap import COMMAND

if TYPE_CHECKING:
    from .retune import Changed


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _verified(verdict: Verdict) -> str:
    if verdict.level != "replay":
        return "static only: NOT REPLAYED on the key's device"
    checks = verdict.checks
    others = checks.get("calls as others ask", 0)
    more = f", and {checks.get('hits as others ask', 0)} of {others} for {OTHERS}" if others else ""
    return f"replay: {checks.get('hits', 0)} of {checks.get('replayed calls', 0)} calls hit{more}"


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Label and value, in the order in which they are shown."""
    table = [("image", outcome.image), ("size", _size(outcome.size))]
    for manifest in outcome.manifests:
        entries = ", ".join(f"{op} {count}" for op, count in manifest.entries_per_op().items())
        table += [("key", manifest.key), ("entries", f"{entries} ({len(manifest.ranks)} ranks)")]
    if outcome.reused and not outcome.tune_seconds:
        tuned = "imported: tuned elsewhere"
    else:
        tuned = f"{outcome.tune_seconds:.1f} s" + (", in the store already: not tuned again" if outcome.reused else "")
    return [
        *table,
        ("tune time", tuned),
        ("verified", _verified(outcome.verdict)),
        ("cache layer", outcome.cache_diff_id),
        ("config digest", outcome.config_digest),
    ]


def _trial(image: str, manifest: Manifest) -> list[str]:
    """What follows `docker run`: a replay of the plan's ops, or the engine as it tuned, with the model at its path."""
    engine = manifest.plan.engine
    if engine is None:
        return [image, "python3", "-m", "pipeline.tune.replay", "--key", manifest.key]
    serve = ["vllm", "serve"] if engine.name == "vllm" else ["python3", "-m", "sglang.launch_server"]
    gpus = ["--gpus", "all"] if manifest.record.host.gpus else []
    return [*gpus, "-v", f"<model>:{engine.model}", "--entrypoint", COMMAND, image, *serve, *engine.arguments]


def show_changed(changed: Changed, *, as_json: bool) -> None:
    """What became of an image whose caches changed: JSON on stdout where asked for, a table on stderr."""
    if as_json:
        json.dump(changed.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    table = [("image", changed.image), *(("key", key) for key in changed.keys)]
    table += [("tune time", f"{changed.tune_seconds:.1f} s")] * bool(changed.tune_seconds)
    table += [("verified", _verified(changed.verdict)), ("kept layers", str(len(changed.kept)))]
    for label, value in table:
        log.line(f"{label:<14} {value}")


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
    first = outcome.manifests[0]
    if first.substitutions:
        log.line("note: tuned on CPU ranks, which prove the pipeline; a CPU cache is of no use to a GPU")
    host = "" if outcome.docker_host == "unix:///var/run/docker.sock" else f"DOCKER_HOST={outcome.docker_host} "
    command = ["docker", "run", "--rm", *_trial(outcome.image, first)]
    log.line(f"try it: {host}{shlex.join(command)}")
