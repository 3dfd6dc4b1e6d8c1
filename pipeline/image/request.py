"""The arguments that `build`, `tune` and `release` share, and the request that they make: what the user asked for."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cache.integrity import check_root, collect, manifest_of
from pipeline.cache.tree import Stored
from pipeline.contract.commandline import budget, path, seconds
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.plan import Plan
from pipeline.flashinfer.gpus import find_arch
from pipeline.flashinfer.ops import check_leader
from pipeline.planning.cli import MODEL_HELP, add_options, plan_from
from pipeline.planning.ops import Target
from pipeline.project import root

from .names import check_image_name

SERVERS = ("vllm", "sglang")
_CPU_ARGS = "--model /mnt/models --max-model-len 512 --max-num-seqs 8"  # of the vLLM for CPUs


@dataclass(frozen=True)
class Request:
    """One `pipeline build`, made once: every later step reads it and none changes it.

    `root` is the project (`pipeline.project`); all timeouts are seconds; empty means unset.

    `plan` is made before anything is known of engine and base, so that what is wrong with the model is said first.
    `make_plan` makes another, for a target and a FlashInfer version. Both are None where a server warms up.
    """

    root: Path
    model: str
    plan: Plan | None = None
    make_plan: Callable[[Target | None, str], Plan] | None = None
    server: str = ""  # vllm or sglang
    server_args: str = ""
    server_env: str = ""
    device: str = ""  # cpu, cuda, or empty: cuda where the engine has GPUs; with a server and its base image cuda
    base_image: str = ""
    accept_base_versions: bool = False
    image: str = ""
    retune: bool = False  # warm up although the store has these inputs; resume no interrupted tuning
    previous: Path | None = None
    caches: tuple[Stored, ...] = ()  # keys to bake instead of tuning, checked
    in_place: Path | None = None  # the folder of a server's `warm-up --in-place`, to bake instead of warming up
    tune_options: tuple[str, ...] = ()  # for the tuner
    gpus: str = ""
    require_idle: bool = False
    bake_jit: bool = True
    startup_timeout: float = 1200.0
    tune_timeout: float = 7200.0  # of a warm-up, and of waiting for another one on the same devices
    install: bool = True  # torch and FlashInfer, where the base has none

    @property
    def imported(self) -> bool:
        """Whether the caches were made elsewhere."""
        return bool(self.caches) or self.in_place is not None


def _roots(text: str) -> tuple[Path, ...] | None:
    """Directories separated by commas; None where there are only commas."""
    found = tuple(Path(word.strip()) for word in text.split(",") if word.strip())
    return found or (None if text.strip() else ())


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Add the planning options, and all that decides how the caches are made."""
    add_options(parser)
    group = parser.add_argument_group("image")
    group.add_argument("--base-image", default="", metavar="REF", help="build on this image, not on the pinned base")
    group.add_argument(
        "--accept-base-versions", action="store_true", help="use the base's own versions, do not compare"
    )
    group.add_argument("--retune", action="store_true", help="warm up again although the store has these caches")
    group.add_argument("--cache", type=_roots, default=(), metavar="DIR,…", help="bake these caches, tune nothing")
    group.add_argument("--no-bake-jit", action="store_true", help="leave compiled modules out of the image")
    server = parser.add_argument_group("server")
    server.add_argument("--server", default="", choices=SERVERS, help="warm up by starting this server, not the tuner")
    server.add_argument(
        "--server-args", default="", metavar="ARGS", help="its arguments, as in production; several sets: A -- B"
    )
    server.add_argument("--server-env", default="", metavar="N=V …", help="its variables; a secret by name alone")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument("--previous", type=path, metavar="DIR", help="an existing cache to start from; validated first")
    tuning.add_argument(
        "--gpus", default="", metavar="LIST", help="GPUs by number or CDI name: 0,1 or nvidia.com/gpu=all"
    )
    tuning.add_argument("--require-idle", action="store_true", help="refuse GPUs that other processes use")
    tuning.add_argument("--timeout", type=seconds, default=300, metavar="S", help="timeout of one collective, in s")
    tuning.add_argument(
        "--tune-max-wait",
        type=seconds,
        default=7200,
        metavar="S",
        help="timeout of the warm-up, and of waiting for another run on the same devices, in s",
    )
    tuning.add_argument(
        "--strategy",
        default="",
        choices=("synchronized", "leader", "independent", "sharded"),
        help="how the ranks share the work (default: the best that this FlashInfer allows)",
    )
    tuning.add_argument(
        "--compare", default="", choices=("on", "off"), help="compare each choice with the default (default: on)"
    )
    tuning.add_argument("--compare-budget", type=budget, metavar="S", help="seconds of comparing per op and bucket")


def add_result_options(parser: argparse._ActionsContainer) -> None:
    """Add the name of the image, the timeout of its verify, and `--json`."""
    parser.add_argument("--image", default="", metavar="NAME", help="name of the image (default: by model and inputs)")
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="timeout of each start at verify, in s"
    )
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on stdout")


def request_to_add(image: str, roots: Sequence[Path], *, name: str, timeout: float) -> Request:
    """The request to add the keys below `roots` to `image`: what is built on is there, and nothing is tuned."""
    caches = collect(roots)
    plan = manifest_of(caches[0]).plan
    return Request(
        root=root(),
        model=plan.model,
        plan=plan,
        make_plan=lambda _target, _version: plan,
        device=plan.device,
        base_image=image,
        accept_base_versions=True,
        image=name,
        caches=caches,
        bake_jit=False,
        startup_timeout=timeout,
        install=False,
    )


def request_from(arguments: argparse.Namespace) -> Request:
    """Check every setting and make the plan; nothing was started before this returns."""
    image = getattr(arguments, "image", "")
    check_image_name(image)
    _check_clashes(arguments)
    _fill_in(arguments)
    previous = _check_previous(arguments.previous)
    in_place = arguments.cache[0] if arguments.server and arguments.cache else None
    caches = collect(arguments.cache) if arguments.cache and in_place is None else ()
    project = root()
    asked = copy.copy(arguments)
    if caches and not asked.device.strip() and not asked.arch.strip():
        # Caches say by their paths what they were tuned on: no GPU need be here.
        gpus = sorted({one.key.arch for one in caches if not one.key.arch.startswith("cpu-")})
        asked.device, asked.arch = ("cuda", gpus[0]) if gpus else ("cpu", "")
    device = asked.device.strip().lower() or ("cuda" if find_arch(asked.arch) else "")

    def make_plan(target: Target | None, version: str) -> Plan:
        words = copy.copy(asked)
        if version and not words.flashinfer_version.strip():
            words.flashinfer_version = version
        return plan_from(words, project, default=target)

    plan = None
    if arguments.server:
        _check_server(arguments)
    else:
        plan = make_plan(Target("cuda", "90a") if device == "cuda" else None, "")
        if not caches:
            check_leader(arguments.strategy, plan)
    return Request(
        root=project,
        model=arguments.model,
        plan=plan,
        make_plan=None if arguments.server else make_plan,
        server=arguments.server,
        server_args=arguments.server_args,
        server_env=arguments.server_env,
        device=device,
        base_image=arguments.base_image,
        accept_base_versions=arguments.accept_base_versions,
        image=image,
        retune=arguments.retune,
        previous=previous,
        caches=caches,
        in_place=in_place,
        tune_options=() if arguments.server else _tuner_words(arguments),
        gpus=arguments.gpus,
        require_idle=arguments.require_idle,
        bake_jit=not arguments.no_bake_jit,
        startup_timeout=float(getattr(arguments, "startup_max_wait", 1200)),
        tune_timeout=float(arguments.tune_max_wait),
    )


_OF_THE_TUNER = (
    "strategy", "compare", "compare_budget", "previous", "ops", "skip_ops",
    "buckets", "backends", "max_tokens", "round_up", "no_bake_jit", "tp", "ep", "pp", "dp",
)  # fmt: skip


def _check_clashes(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for options that exclude each other."""
    if arguments.cache is None:
        raise UsageError("CACHE= names no directory", hint="CACHE=dir or CACHE=dir1,dir2: roots above <version>/")
    if arguments.cache and arguments.retune:
        raise UsageError("CACHE= bakes what was tuned elsewhere, and you asked to tune", hint="leave one of them out")
    if arguments.gpus and arguments.device.strip().lower() == "cpu":
        raise UsageError(f"GPUS={arguments.gpus} chooses GPUs, and DEVICE=cpu uses none", hint="leave one of them out")
    if not arguments.server:
        if arguments.server_args or arguments.server_env:
            raise UsageError("SERVER_ARGS and SERVER_ENV need SERVER=", hint=f"SERVER={' or SERVER='.join(SERVERS)}")
        return
    if len(arguments.cache) > 1:
        raise UsageError("with SERVER=, CACHE= is one folder", hint="the one that `pipeline warm-up --in-place` wrote")
    if not arguments.base_image and arguments.device.strip().lower() not in ("", "cpu"):
        raise UsageError(
            f"SERVER={arguments.server} on a GPU needs BASE_IMAGE=: the image that will serve",
            hint="BASE_IMAGE=vllm/vllm-openai:<version> or lmsysorg/sglang:<version>",
        )
    given = [name for name in _OF_THE_TUNER if name != "tp" and getattr(arguments, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"SERVER= starts the server and no tuner: {names} {'do' if len(given) > 1 else 'does'} not apply",
            hint="leave it out; options of the server go into SERVER_ARGS (--server-args)",
        )


def _fill_in(arguments: argparse.Namespace) -> None:
    """What a server's options say without naming it: without a base image its base is a vLLM for CPUs, and TP= goes
    to the server. Raise `UsageError` where TP= says another size than the server's own arguments.
    """
    if arguments.server and not arguments.base_image:
        arguments.device = "cpu"
        arguments.server_args = arguments.server_args or _CPU_ARGS
    if arguments.server and arguments.tp:
        from pipeline.servers.words import with_tp

        arguments.server_args, arguments.tp = with_tp(arguments.server, arguments.server_args, arguments.tp), None


def _check_server(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments, variables or a model that no base could serve: before anything is started."""
    from pipeline.servers import words
    from pipeline.servers.model import read_model

    words.parse(arguments.server, arguments.server_args, arguments.server_env)
    read_model(arguments.model)


def _check_previous(previous: Path | None) -> Path | None:
    """Check the cache root that ranks shall start from; None stays None."""
    if previous is None:
        return None
    if not previous.is_dir():
        raise UsageError(f"{previous} is not a directory", hint="give the root above <flashinfer-version>/")
    _, findings = check_root(previous)
    if findings:
        raise CacheRefused(
            f"{previous} cannot be used as PREVIOUS: {findings[0]}",
            details=[str(finding) for finding in findings[:20]],
            hint="leave PREVIOUS out to tune from scratch",
        )
    return previous


def _tuner_words(arguments: argparse.Namespace) -> tuple[str, ...]:
    words = ["--timeout", str(arguments.timeout)]
    for name in ("strategy", "compare", "compare-budget"):
        value = getattr(arguments, name.replace("-", "_"))
        if value:
            words += [f"--{name}", str(value)]
    return tuple(words)
