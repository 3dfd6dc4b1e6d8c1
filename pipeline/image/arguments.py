"""The arguments that `image` and `tune` share, and the request that they make."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

from pipeline.contract.bounds import budget, seconds
from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Plan
from pipeline.flashinfer.gpus import find_arch
from pipeline.flashinfer.leader import check_leader
from pipeline.planning.cli import MODEL_HELP, add_options, engine_plan, plan_from
from pipeline.planning.engines import engine_start
from pipeline.planning.ops import Target

from .caches import collect
from .request import Request
from .settings import check_image_name, check_previous

ROOT = Path(__file__).resolve().parent.parent.parent


class ChoicesClash(UsageError):
    """Two options that exclude each other."""


def _roots(text: str) -> tuple[Path, ...] | None:
    """Directories separated by commas; None where there are only commas."""
    found = tuple(Path(word.strip()) for word in text.split(",") if word.strip())
    return found or (None if text.strip() else ())


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the planning options, and what decides how the ranks tune."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_tuning_options(parser)


def add_tuning_options(parser: argparse.ArgumentParser) -> None:
    """Add the planning options and what decides how the ranks tune, without MODEL."""
    add_options(parser)
    group = parser.add_argument_group("tuning")
    group.add_argument("--base-image", default="", metavar="REF", help="build on this image, not on the pinned base")
    group.add_argument(
        "--accept-base-versions", action="store_true", help="record a base's own versions, do not compare"
    )
    group.add_argument("--retune", action="store_true", help="tune again although the store has this very cache")
    group.add_argument("--cache", type=_roots, default=(), metavar="DIR,…", help="bake these caches instead of tuning")
    group.add_argument("--no-bake-jit", action="store_true", help="leave compiled modules out of the image")
    group.add_argument("--engine", default="", metavar="vllm|sglang", help="let this engine tune in its own start")
    group.add_argument("--engine-args", default="", metavar="WORDS", help="the words after its serve command")
    group.add_argument("--engine-env", default="", metavar="N=V …", help="variables that are set for it at run time")
    add_rank_arguments(group)
    add_store(group)


def add_rank_arguments(group: argparse._ArgumentGroup) -> None:
    """Add where the ranks run, on which GPUs, how they tune, and what bounds them."""
    group.add_argument("--no-resume", action="store_true", help="take up nothing of an interrupted tuning, as --retune")
    group.add_argument("--previous", type=path, metavar="DIR", help="let the ranks start from this cache root")
    group.add_argument(
        "--tune-in",
        default="",
        choices=("stage", "container", "import"),
        help="where the ranks run (default: what the engine can do, which is asked and said)",
    )
    add_gpus(group)
    group.add_argument("--require-idle", action="store_true", help="refuse GPUs that other processes use")
    group.add_argument("--timeout", type=seconds, default=300, metavar="S", help="bound of a collective between ranks")
    group.add_argument(
        "--tune-max-wait",
        type=seconds,
        default=7200,
        metavar="S",
        help="bound of the whole tuning, compiling apart (the classic builder keeps to --timeout alone)",
    )
    group.add_argument(
        "--strategy",
        default="",
        choices=("synchronized", "leader", "independent", "sharded"),
        help="how the ranks share the work (default: the best that this FlashInfer allows)",
    )
    group.add_argument(
        "--judge", default="", choices=("on", "off"), help="judge each choice against the default (default: on)"
    )
    group.add_argument("--judge-budget", type=budget, metavar="S", help="bound of judging: seconds per op and bucket")
    group.add_argument(
        "--jurors",
        choices=[str(n) for n in range(9)],
        metavar="N",
        help="processes beside each rank that judge, 0 to 8",
    )


def add_gpus(group: argparse._ActionsContainer) -> None:
    """Add which GPUs of the engine are used."""
    group.add_argument(
        "--gpus", default="", metavar="LIST", help="GPUs by number or CDI name: 0,1 or nvidia.com/gpu=all"
    )


def add_store(group: argparse._ActionsContainer) -> None:
    """Add the image store of an engine that has to be started."""
    group.add_argument(
        "--store",
        choices=("classic", "containerd"),
        default="",
        help="of an engine we start (default: what it had, at first classic)",
    )


def add_result_arguments(parser: argparse._ActionsContainer, image: str) -> None:
    """Add the name of the image that is made (`image` says the default), the bound of its verify, and `--json`."""
    parser.add_argument("--image", default="", metavar="NAME", help=f"name of the image (default: {image})")
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="bound of start and replay at verify"
    )
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on stdout")


def retune_request(arguments: argparse.Namespace) -> Request:
    """The request of an image that exists: its plan and base come from the image, see `retune`."""
    check_image_name(arguments.image)
    if getattr(arguments, "tune_in", "") == "import":
        raise ChoicesClash(
            "TUNE_IN=import bakes what was tuned elsewhere", hint="`pipeline cache add IMAGE CACHE` adds it"
        )

    def none(_target: Target | None, _version: str) -> Plan:
        raise AssertionError("the plan comes from the image")

    given = vars(arguments)
    return Request(
        root=ROOT,
        plan=none,
        image=arguments.image,
        retune=True,
        previous=check_previous(given.get("previous")),
        tune_in=given.get("tune_in", ""),
        strategy=given.get("strategy", ""),
        tune_options=_words(arguments) if "timeout" in given else (),
        gpus=arguments.gpus,
        require_idle=given.get("require_idle", False),
        max_wait=float(arguments.startup_max_wait),
        max_tune=float(given.get("tune_max_wait", 7200)),
        store=arguments.store,
    )


def _tune_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.engine.strip():
        asked = (arguments.strategy, arguments.judge, arguments.judge_budget, arguments.jurors, arguments.previous)
        if any(asked):
            raise ChoicesClash(
                "an engine tunes in its own way: STRATEGY, JUDGE, JURORS and PREVIOUS do not reach it",
                hint="leave them out",
            )
        return ("--timeout", str(arguments.timeout), "--engine-max-wait", str(arguments.tune_max_wait))
    return _words(arguments)


def _words(arguments: argparse.Namespace) -> tuple[str, ...]:
    words = ["--timeout", str(arguments.timeout)]
    for name in ("strategy", "judge", "judge-budget", "jurors"):
        value = getattr(arguments, name.replace("-", "_"))
        if value:
            words += [f"--{name}", str(value)]
    return tuple(words)


def _plan_for_caches(arguments: argparse.Namespace) -> None:
    """Caches to bake say by their paths what they were tuned on, where the user does not: no GPU need be here."""
    if not arguments.cache or arguments.device.strip() or arguments.arch.strip():
        return
    arches = {p.parent.name for root in arguments.cache for p in root.glob("*/*/*") if p.is_dir()}
    gpus = sorted(arch for arch in arches if not arch.startswith("cpu-"))
    arguments.device = "cuda" if gpus else "cpu" if arches else ""
    arguments.arch = gpus[0] if gpus else ""


def request_from(arguments: argparse.Namespace) -> Request:
    """Check every setting and make the plan once; nothing was started before this returns."""
    image = getattr(arguments, "image", "")
    check_image_name(image)
    if arguments.cache is None:
        raise ChoicesClash("CACHE= names no directory", hint="CACHE=dir or CACHE=dir1,dir2: roots above <version>/")
    if arguments.tune_in == "import" and not arguments.cache:
        raise ChoicesClash("TUNE_IN=import needs CACHE=", hint="CACHE=dir: the root above <flashinfer-version>/")
    if arguments.cache and (arguments.retune or arguments.tune_in in ("stage", "container")):
        raise ChoicesClash("CACHE= bakes what was tuned elsewhere, and you asked to tune", hint="leave one of them out")
    previous = check_previous(arguments.previous)
    if arguments.cache:
        collect(arguments.cache)  # what must not be baked is said before an engine is looked for
    _plan_for_caches(arguments)

    start = engine_start(arguments.engine, arguments.engine_args, arguments.engine_env, arguments.model)
    if start is not None and arguments.cache:
        raise ChoicesClash("CACHE= bakes what was tuned elsewhere, and ENGINE= tunes", hint="leave one of them out")

    def plan(target: Target | None, version: str) -> Plan:
        asked = copy.copy(arguments)
        if version and not asked.flashinfer_version.strip():
            asked.flashinfer_version = version
        return plan_from(asked, ROOT, default=target) if start is None else engine_plan(asked, ROOT, start, target)

    made = plan(Target("cuda", "90a") if arguments.device.strip().lower() == "cuda" else None, "")
    if not arguments.cache:
        check_leader(arguments.strategy, made)
    return Request(
        root=ROOT,
        plan=plan,
        device=arguments.device.strip().lower() or ("cuda" if find_arch(arguments.arch) else ""),
        base_image=arguments.base_image,
        accept_base_versions=arguments.accept_base_versions,
        image=image,
        retune=arguments.retune,
        resume=not arguments.no_resume,
        previous=previous,
        caches=arguments.cache,
        tune_in=arguments.tune_in,
        strategy=arguments.strategy,
        tune_options=_tune_options(arguments),
        gpus=arguments.gpus,
        require_idle=arguments.require_idle,
        bake_jit=not arguments.no_bake_jit,
        max_wait=float(getattr(arguments, "startup_max_wait", 1200)),
        max_tune=float(arguments.tune_max_wait),
        store=arguments.store,
    )
