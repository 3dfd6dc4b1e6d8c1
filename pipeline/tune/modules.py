"""`python -m pipeline.tune.modules PLAN OUT`: compile what a plan loads, as prebuilt modules in FlashInfer's own place.

    OUT/<absolute path of FlashInfer's AOT directory>/<name>/<name>.so

so that OUT, laid over `/`, makes them load with no compiler and with `FLASHINFER_DISABLE_JIT=1`, from any workspace.
Needs nvcc, no GPU where `FLASHINFER_CUDA_ARCH_LIST` names the architecture. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from pipeline import log
from pipeline.contract.commandline import path
from pipeline.contract.errors import PipelineError, UsageError, WarmUpError
from pipeline.contract.plan import Plan


class ModulesFailed(WarmUpError):
    """A module of the plan could not be compiled."""


def compile_into(plan: Plan, out: Path) -> list[dict[str, object]]:
    """Compile the plan's modules that FlashInfer does not bring, and copy them to their place below `out`.

    Returns name, size in bytes and sha256 of each copied module. Raises `ModulesFailed`.
    """
    from dataclasses import asdict

    from .jit import build_all, describe, specs_of

    missing = [one for _, one in sorted(specs_of(plan).items()) if not one.is_aot]
    with log.step(f"compile {len(missing)} modules"):
        try:
            build_all(missing)
        except Exception as error:  # compilers' drivers raise anything
            lines = str(error).strip().splitlines()
            raise ModulesFailed(
                f"FlashInfer's modules do not compile: {lines[0] if lines else type(error).__name__}",
                details=lines[-20:],
                hint="the base needs nvcc, ninja and CUDA's headers; BAKE_JIT=0 leaves compiled modules out",
            ) from error
    told = []
    for one in missing:
        place = out / str(one.aot_path).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(one.get_library_path(), place)
        told.append(asdict(describe(one)))
    return told


def main() -> int:
    """Arguments and exit codes, nothing else."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.tune.modules", description=__doc__.splitlines()[0])
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
