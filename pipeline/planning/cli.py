"""The planning options of the command line, shared by every command that starts from a model.

Options are text until they are read here: all that is wrong is shown at once, and an option that a Makefile passes
empty counts as not given.
"""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import MOST_RANKS, MOST_SEEDS, Layout, Plan
from pipeline.flashinfer.gpus import arch_choices, find_arch

from .buckets import LARGEST, read_buckets
from .model_source import usual_tp
from .ops import Target
from .plan import SEED, make_plan
from .problems import PlanRefused, Problems

T = TypeVar("T")
MODEL_HELP = "a bundled model, a path to a config.json or its folder, or a hub id"
SIZES = ("tp", "ep", "pp", "dp")
OPTIONS = (
    ("tp", "N", "tensor parallel ranks (1; tiny and tiny-moe 2)"),
    ("ep", "N", "expert parallel ranks, out of the tensor and data parallel ones (1)"),
    ("pp", "N", "pipeline parallel stages (1)"),
    ("dp", "N", "data parallel ranks (1)"),
    ("device", "cpu|cuda", "what to plan for (cuda where --arch names a GPU, else cpu)"),
    ("arch", "NAME", "the GPU or its architecture, such as b200 or 100a"),
    ("max-tokens", "N", "the most tokens in one batch (cuda 8192, cpu 128)"),
    ("buckets", "N,F-L:S,…", "token counts to tune instead of FlashInfer's own; 8-256:8 is every eighth from 8 to 256"),
    ("skip-ops", "OP,OP,…", "FlashInfer ops to leave untuned, such as fp4_gemm"),
    ("ops", "OP,OP,…", "plan only these, by op (mm_bf16) or product (qkv)"),
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
    group.add_argument("--round-up", action="store_true", help="map a token count up to the next custom bucket")


def integer(smallest: int, largest: int) -> Callable[[str], int]:
    """A reader of integers in a range; it raises `ArgumentTypeError`."""

    def read(text: str) -> int:
        if re.fullmatch(r"[0-9]{1,12}", text, re.ASCII) and smallest <= (number := int(text)) <= largest:
            return number
        raise argparse.ArgumentTypeError(f"expected an integer from {smallest} to {largest}")

    return read


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas or blanks between them."""
    return tuple(word for word in re.split(r"[,\s]+", text) if word)


def products(text: str) -> tuple[str, ...]:
    """The words of --ops: the table joins names of equal ops with a plus."""
    return words(text.replace("+", ","))


def backends(text: str) -> dict[str, tuple[str, ...]]:
    """`mm_bf16=cublaslt+tinygemm,…`; raises `ArgumentTypeError`."""
    found: dict[str, tuple[str, ...]] = {}
    for word in words(text):
        op, _, names = word.partition("=")
        chosen = tuple(dict.fromkeys(name for name in names.split("+") if name))
        if not chosen:
            raise argparse.ArgumentTypeError(f"{word} names no backend; write it as mm_bf16=cublaslt+tinygemm")
        if op in found:
            raise argparse.ArgumentTypeError(f"names {op} twice; write {op}={'+'.join((*found[op], *chosen))}")
        found[op] = chosen
    return found


def _read(arguments: argparse.Namespace, name: str, reader: Callable[[str], T], problems: Problems) -> T | None:
    """The value of an option; None where it was not given or is wrong, which is noted."""
    text = str(getattr(arguments, name)).strip()
    option = f"--{name.replace('_', '-')}"
    try:
        return reader(text) if text else None
    except argparse.ArgumentTypeError as error:
        problems.add(f"{option} {text}: {error}", f"see {option} in `pipeline plan --help`")
        return None


def target(arguments: argparse.Namespace, default: Target | None, problems: Problems) -> Target:
    """What --device and --arch name: this machine's processor, or a GPU; `default` where they leave it open."""
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
            problems.add(f"--arch {arch} is not a processor", "leave --arch out, or say --device cuda")
        return Target("cpu", arch or cpu)
    found = find_arch(arch)
    if not arch:
        problems.add("--device cuda needs --arch", "--arch h200, b200 or an architecture such as 90a")
    elif not found:
        problems.add(f"--arch {arch} is no GPU or GPU architecture that can be planned for", arch_choices(arch))
    return Target("cuda", found)


def _flashinfer(arguments: argparse.Namespace, root: Path) -> str:
    if arguments.flashinfer_version.strip():
        return str(arguments.flashinfer_version).strip()
    from pipeline.versions import values  # not needed where the version is given

    return values(root)["FLASHINFER_VERSION"]


def plan_from(arguments: argparse.Namespace, root: Path, default: Target | None = None) -> Plan:
    """Make the plan that the arguments ask for; `default` is what this host would tune on, where that is known.

    `root` is the folder that holds versions.json. Raises `UsageError`s alone: `PlanRefused` with every problem where
    there are several.
    """
    problems = Problems()
    sizes = {name: _read(arguments, name, integer(1, MOST_RANKS), problems) for name in SIZES}
    sizes["tp"] = sizes["tp"] or usual_tp(arguments.model)
    where = target(arguments, default, problems)
    most = _read(arguments, "max_tokens", integer(1, LARGEST), problems)
    buckets = read_buckets(arguments.buckets, problems)
    seed = _read(arguments, "seed", integer(0, MOST_SEEDS - 1), problems)
    chosen = _read(arguments, "backends", backends, problems)
    try:
        return make_plan(
            arguments.model,
            layout=Layout(**{name: size or 1 for name, size in sizes.items()}),
            target=where,
            flashinfer_version=_flashinfer(arguments, root),
            max_tokens=most,
            buckets=buckets or None,
            round_up=arguments.round_up,
            skip_ops=words(arguments.skip_ops),
            ops=products(arguments.ops) or None,
            backends=chosen,
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
