"""The compiled modules that a plan loads, built once per node before anything is timed; or alone, for an image.

The first rank of each node builds all of them at once, and says how far it is; the others wait. Then every rank loads
them. Building takes minutes and must not fall into a measurement, nor into a group's timeout.

`python -m pipeline.tune.jit PLAN OUT` compiles what a plan loads, as prebuilt modules in FlashInfer's own place:

    OUT/<absolute path of FlashInfer's AOT directory>/<name>/<name>.so

so that OUT, laid over `/`, makes them load with no compiler and with `FLASHINFER_DISABLE_JIT=1`, from any workspace.
It needs nvcc, no GPU where `FLASHINFER_CUDA_ARCH_LIST` names the architecture, and prints one JSON object.

Each module is built as FlashInfer builds it on loading, in its own folder: ninja keeps its log where it runs, and what
was built by one run for all (`build_jit_specs`) is unknown to the run that loads it, which compiles it once more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.commandline import path
from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import PipelineError, UsageError, WarmUpError
from pipeline.contract.manifest import Module
from pipeline.contract.plan import Plan
from pipeline.flashinfer.ops import is_skipped

from . import flashinfer_api
from .ops import spec_of

if TYPE_CHECKING:
    from .session import Session
    from .steps import Steps

_PATIENCE = 4 * 3600.0  # seconds that a build may take; 182 sources of one MoE module take an hour and a half
_AT_ONCE = 4  # modules built side by side
_TICK = 2.0
_ONLY_TUNING = ("flashinfer.jit.tllm_utils", "gen_trtllm_utils_module")  # the delay before a timed launch


class JitFailed(WarmUpError):
    """A module could not be compiled or loaded."""


def prebuild(session: Session) -> None:
    """Build and load the plan's modules on every node, and list them in the session. Raises `JitFailed` on all ranks.

    Nothing to do on a CPU, or where all of them came compiled with FlashInfer.
    """
    if session.device.type != "cuda":
        return
    began, ranks = time.monotonic(), session.ranks
    ranks.steps.say("finding the JIT modules")
    wanted = specs_of(session.plan)
    error = ""
    if int(os.environ.get("LOCAL_RANK") or ranks.rank) == 0:
        error = _build([*wanted.values(), flashinfer_api.jit_spec(*_ONLY_TUNING)], ranks.steps)
    _all_well(ranks.gather(error))
    ranks.steps.say("loading the JIT modules")
    try:
        for one in (*wanted.values(), flashinfer_api.jit_spec(*_ONLY_TUNING)):
            one.build_and_load()
    except Exception as failure:  # noqa: BLE001 - linkers and loaders raise anything
        error = _words(failure)
    _all_well(ranks.gather(error))
    session.modules = tuple(describe(one) for _, one in sorted(wanted.items()))
    session.phases["jit"] = time.monotonic() - began


def specs_of(plan: Plan) -> dict[str, Any]:
    """FlashInfer's JitSpec of each module that the plan loads, by name."""
    found: dict[str, Any] = {}
    for op in plan.ops:
        if not is_skipped(op.op, plan.skip_ops):
            for one in spec_of(op).modules(op):
                found.setdefault(one.name, one)
    return found


def describe(one: Any) -> Module:  # noqa: ANN401 - a JitSpec
    """Name, size, sha256 and path of a compiled module."""
    path = one.get_library_path()
    return Module(one.name, path.stat().st_size, sha256_file(path), str(path))


def _build(specs: Sequence[Any], steps: Steps) -> str:
    """Build what is not there; return what went wrong, or nothing."""
    missing = [one for one in specs if not one.is_aot]
    if not missing:
        return ""
    try:
        with _progress(missing, steps):
            build_all(missing)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler's driver raises
        return _words(failure)
    return ""


def build_all(specs: Sequence[Any]) -> None:
    """Build modules side by side, each in its own folder; raise what the first that fails raises.

    Each build runs as many compilers as there are cores, or MAX_JOBS, so that only a few go on at one time.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(one.build, verbose=False, need_lock=True) for one in specs]:
            done.result()


@contextlib.contextmanager
def _progress(specs: Sequence[Any], steps: Steps) -> Iterator[None]:
    """Say how many objects are compiled, from a thread: the build itself only blocks. Falls silent after _PATIENCE,
    so that the watchdog ends a build that hangs.
    """
    objects = [place for one in specs for place in one.get_object_paths()]
    done, end, began = threading.Event(), time.monotonic() + _PATIENCE, time.time()

    def tell() -> None:
        while not done.wait(_TICK) and time.monotonic() < end:
            made = sum(_written_since(place, began) for place in objects)
            steps.say(f"building {len(specs)} JIT modules, {made} of {len(objects)} objects compiled",
                      f"{time.time() - began:.0f} s")  # fmt: skip

    steps.say(f"building {len(specs)} JIT modules")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _written_since(place: Path, when: float) -> bool:
    try:
        return place.stat().st_mtime >= when
    except OSError:
        return False


def _words(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


def _all_well(said: Sequence[str]) -> None:
    """Raise on every rank where one of them failed."""
    for rank, text in enumerate(said):
        if text:
            raise _failed(f"rank {rank} could not compile FlashInfer's modules", text)


def _failed(what: str, text: str) -> JitFailed:
    lines = text.strip().splitlines()
    hint = "the image needs nvcc, ninja and the CUDA headers, or FlashInfer's compiled modules (BAKE_JIT=0)"
    return JitFailed(f"{what}: {lines[0]}", details=lines[-20:], hint=hint)


def compile_into(plan: Plan, out: Path) -> list[dict[str, object]]:
    """Compile the plan's modules that FlashInfer does not bring, and copy them to their place below `out`.

    Returns name, size in bytes and sha256 of each copied module. Raises `JitFailed`.
    """
    missing = [one for _, one in sorted(specs_of(plan).items()) if not one.is_aot]
    with log.step(f"compile {len(missing)} modules"):
        try:
            build_all(missing)
        except Exception as error:  # compilers' drivers raise anything
            raise _failed("FlashInfer's modules do not compile", _words(error)) from error
    for one in missing:
        place = out / str(one.aot_path).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(one.get_library_path(), place)
    return [asdict(describe(one)) for one in missing]


def main() -> int:
    """Arguments and exit codes, nothing else."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.tune.jit", description="Compile what a plan loads.")
    parser.add_argument("plan", type=path)
    parser.add_argument("out", type=path, metavar="OUT")
    options = parser.parse_args()
    try:
        try:
            plan = Plan.from_json(json.loads(options.plan.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UsageError(f"{options.plan}: {error}", hint="make it with `pipeline plan`") from error
        options.out.mkdir(parents=True, exist_ok=True)
        told = compile_into(plan, options.out)
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    sys.stdout.write(json.dumps({"modules": told}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
