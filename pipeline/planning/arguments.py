"""The planning options of the command line, shared by every command that starts from a model.

Numbers arrive as text and are read here, so that all that is wrong is said at once, and so that an option that a
Makefile passes empty counts as not given.
"""

from __future__ import annotations

import argparse
import platform
import re
from pathlib import Path, PurePosixPath

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import MOST_RANKS, MOST_SEEDS, Layout, Plan

from .buckets import LARGEST, read_buckets
from .engines import Start
from .find import usual_tp
from .make import SEED, make_plan
from .problems import PlanRefused, Problems
from .target import Target
from .words import whole_number, words

MODEL_HELP = "a bundled model, a path to a config.json or its folder, or a hub id"
OPTIONS = (
    ("tp", "N", "tensor parallel ranks (1; tiny and tiny-moe 2)"),
    ("ep", "N", "expert parallel ranks, out of the tensor and data parallel ones (1)"),
    ("pp", "N", "pipeline parallel stages (1)"),
    ("dp", "N", "data parallel ranks (1)"),
    ("device", "cpu|cuda", "what to plan for (cuda where --arch names a GPU, else cpu)"),
    ("arch", "NAME", "the GPU architecture as FlashInfer names it, such as 90a"),
    ("max-tokens", "N", "the most tokens in one batch (cuda 8192, cpu 128)"),
    ("buckets", "N,F-L:S,…", "token counts to tune instead of FlashInfer's own; 8-256:8 is every eighth from 8 to 256"),
    ("skip-ops", "OP,OP,…", "FlashInfer ops to leave untuned, such as fp4_gemm"),
    ("ops", "OP,OP,…", "plan only these, by adapter (mm_bf16) or product (qkv)"),
    ("backends", "OP=B+B,…", "backends that compete in an op, such as mm_bf16=cublaslt+tinygemm"),
    ("seed", "N", "seed of the random inputs"),
    ("flashinfer-version", "VERSION", "instead of the one in versions.json"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and every option that shapes a plan."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option that shapes a plan, without MODEL."""
    group = parser.add_argument_group("plan")
    for name, metavar, line in OPTIONS:
        group.add_argument(f"--{name}", metavar=metavar, default="", help=line)
    group.add_argument("--round-up", action="store_true", help="map a token count up to the next own bucket")


def _target(arguments: argparse.Namespace, default: Target | None, problems: Problems) -> Target:
    cpu = f"cpu-{platform.machine()}"
    device, arch = arguments.device.strip().lower(), arguments.arch.strip()
    if device not in ("", "cpu", "cuda"):
        problems.add(f"--device {device} is neither cpu nor cuda", "leave --device out to plan for this machine")
        return Target("cpu", cpu)
    if not arch and default is not None and device in ("", default.device):
        return default
    device = device or ("cpu" if not arch or arch.startswith("cpu") else "cuda")
    if device == "cpu":
        if arch and not re.fullmatch(r"cpu-[A-Za-z0-9_]+", arch):
            problems.add(f"--arch {arch} is no processor", "leave --arch out, or say --device cuda")
        return Target("cpu", arch or cpu)
    if not arch:
        problems.add("--device cuda needs --arch", "--arch 90a is H100 and H200, 100a is B200")
    return Target("cuda", arch or "90a")


def _backends(text: str, problems: Problems) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for word in words(text):
        op, equals, names = word.partition("=")
        chosen = tuple(dict.fromkeys(name for name in names.split("+") if name))
        if not equals or not chosen:
            problems.add(f"--backends {word} names no backend", "write it as mm_bf16=cublaslt+tinygemm")
        elif op in found:
            problems.add(f"--backends names {op} twice", f"write it as {op}={'+'.join((*found[op], *chosen))}")
        else:
            found[op] = chosen
    return found


def _flashinfer(arguments: argparse.Namespace, root: Path) -> str:
    if arguments.flashinfer_version.strip():
        return str(arguments.flashinfer_version).strip()
    from pipeline.versions import load  # not needed where the version is given

    return str(load(root)["FLASHINFER_VERSION"])


def engine_plan(arguments: argparse.Namespace, root: Path, start: Start, default: Target | None = None) -> Plan:
    """The plan of an engine's own start: no ops, the ranks that its arguments make. Raises `UsageError`s alone."""
    problems = Problems()
    target = _target(arguments, default, problems)
    for name in ("tp", "ep", "pp", "dp"):
        asked = whole_number(getattr(arguments, name), name.upper(), problems, largest=MOST_RANKS)
        made = getattr(start.layout, name)
        if asked is not None and asked != made:
            problems.add(f"{name.upper()}={asked}, and ENGINE_ARGS say {made}", f"leave {name.upper()} out")
    for option in ("max_tokens", "buckets", "ops", "skip_ops", "backends"):
        if getattr(arguments, option).strip():
            said = option.upper()
            problems.add(f"{said} does not reach an engine", "what is tuned is its choice; see its own options")
    problems.check()
    path = PurePosixPath(start.run.model)
    return Plan(
        model=path.name or "model",
        device=target.device,
        arch=target.arch,
        flashinfer_version=_flashinfer(arguments, root),
        layout=start.layout,
        ops=(),
        engine=start.run,
    )


def plan_from(arguments: argparse.Namespace, root: Path, default: Target | None = None) -> Plan:
    """Make the plan that the arguments ask for; `default` is what this host would tune on, where that is known.

    `root` is the folder that holds versions.json. Raises `UsageError`s alone: `PlanRefused` with every problem where
    there are several.
    """
    problems = Problems()
    sizes = {
        name: whole_number(getattr(arguments, name), name.upper(), problems, largest=MOST_RANKS)
        for name in ("tp", "ep", "pp", "dp")
    }
    sizes["tp"] = sizes["tp"] or usual_tp(arguments.model)
    target = _target(arguments, default, problems)
    most = whole_number(arguments.max_tokens, "--max-tokens", problems, largest=LARGEST)
    buckets = read_buckets(arguments.buckets, problems)
    seed = whole_number(arguments.seed, "--seed", problems, largest=MOST_SEEDS - 1, smallest=0)
    try:
        return make_plan(
            arguments.model,
            layout=Layout(**{name: size or 1 for name, size in sizes.items()}),
            device=target.device,
            arch=target.arch,
            flashinfer_version=_flashinfer(arguments, root),
            max_tokens=most,
            buckets=buckets or None,
            round_up=arguments.round_up,
            skip_ops=words(arguments.skip_ops),
            ops=words(arguments.ops.replace("+", ",")) or None,  # the table joins names of equal ops with a plus
            backends=_backends(arguments.backends, problems),
            seed=SEED if seed is None else seed,
            problems=problems,
        )
    except PlanRefused:
        raise
    except UsageError as error:  # an unreadable model, beside what was wrong already
        if not problems.found:
            raise
        problems.add(error.message, error.hint)
        problems.check()
        raise
