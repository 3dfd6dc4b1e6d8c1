"""`--print-plan`: the commands of `pipeline image`, as one could type them, without running any.

The base and the wheels are fetched where they are not there yet, since the commands name them. What only a run can tell
stands in capitals: TUNER, IMAGE (ids of built images), TUNED (a folder with the cache) and KEY.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.places import CACHE_ROOT
from pipeline.home import cache_home
from pipeline.run import spelled

from . import modules
from .buildkit import Stage
from .choose import choose, filler
from .contain import Sandbox
from .fill import ClassicFiller, ContainerFiller, StageFiller, command
from .guard import connected
from .outcome import log_file
from .prepare import Prepared, prepare
from .request import Request
from .unfinished import Unfinished
from .verify import SANDBOXES
from .wrap import context_name

if TYPE_CHECKING:
    from .fill import Filler

_TUNED = Path("TUNED")


def print_plan(request: Request) -> list[str]:
    """The lines of a shell script: comments, and the commands in order."""
    from pipeline.daemon import ensure

    logfile = log_file(cache_home(), "plan")
    engine = ensure(store=request.store or None)
    with connected(engine) as client:
        prepared = prepare(request, engine, client, logfile)
        env = [f"export {name}={shlex.quote(value)}" for name, value in sorted(prepared.builder.environment.items())]
        log.note("nothing is built, tuned or verified: these are the commands")
        return [*env, *_lines(request, prepared)]


def _lines(request: Request, prepared: Prepared) -> Iterator[str]:
    build = prepared.builder.command(Stage("tuner", contexts=prepared.contexts, arguments=prepared.arguments))
    if not request.caches or prepared.plan.device == "cuda":
        yield "# build; TUNER is the id of the image that comes of it"
        yield spelled(build)
    if prepared.plan.device == "cuda" and request.bake_jit:
        yield "# compile the modules that the plan loads, which become the context `modules`"
        yield spelled(docker_run("TUNER", modules.command(), modules.sandbox(prepared.plan, prepared.gpus)))
    if request.caches:
        yield f"# tuned elsewhere: {', '.join(map(str, request.caches))}"
    else:
        way = choose(request, prepared)
        yield f"# tune in: {way.form} ({way.reason})"
        yield from _tune(filler(way, request, prepared, "TUNER", Unfinished(cache_home() / "unfinished" / "STATE")))
    count = max(1, len(request.caches))
    staged = {context_name(at): _TUNED for at in range(count)}
    yield "# bake; the names of the contexts `tuned` carry digits of their content, the labels name the keys"
    yield spelled(
        prepared.final_builder(count).command(
            Stage("final", contexts={**prepared.contexts, **staged}, arguments=prepared.arguments)
        )
    )
    replay = ["python3", "-m", "pipeline.tune.replay", "--key", "KEY"]
    for who, sandbox in SANDBOXES.items():
        yield f"# verify: replay as {who}"
        yield spelled(docker_run("IMAGE", replay, replace(sandbox, gpus=prepared.gpus)))


def _tune(how: Filler) -> Iterator[str]:
    if isinstance(how, StageFiller):
        yield spelled(how.builder.command(how.stage(_TUNED)))
    elif isinstance(how, ClassicFiller):
        yield "DOCKER_BUILDKIT=0 " + spelled(
            ["docker", "build", "--no-cache", "--force-rm", "--network=none", f"--shm-size={how.shm_size}",
             "--tag=TUNING", "--file=-", str(how.previous.parent)]
        ) + " <<'EOF'"  # fmt: skip
        yield from how.dockerfile(state=False).rstrip().splitlines()
        yield "EOF"
        yield f"docker create --name TUNING TUNING true && docker cp TUNING:/out {_TUNED}{CACHE_ROOT}"
    elif isinstance(how, ContainerFiller):
        words = docker_run("TUNER", command(how.options), how.sandbox())
        words = ["docker", "create", "--name", "TUNING", *words[words.index("--rm") + 1 :]]
        yield spelled(words)
        yield f"docker cp {shlex.quote(str(how.previous))} TUNING:/previous && docker start --attach TUNING"
        yield f"docker cp TUNING:/out {_TUNED}{CACHE_ROOT} && docker rm --force TUNING"


def docker_run(image: str, words: list[str], sandbox: Sandbox) -> list[str]:
    """The docker CLI's words for a container that the SDK would run."""
    return ["docker", "run", "--rm", *sandbox.words(), image, *words]
