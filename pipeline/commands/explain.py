"""`pipeline explain LOCATION`: would this cache be used here, and if not, why?"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.locations import METAVAR
from pipeline.contract.commandline import path, seconds
from pipeline.contract.errors import CacheRefused, Exit, UsageError

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient
    from pipeline.cache.environment import Environment
    from pipeline.cache.explain import Explanation
    from pipeline.contract.record import Record

_NAMES = ("autotune_config", "rank_")  # how FlashInfer, vLLM and SGLang name their files
_MOST = 10_000


class RecordUnread(CacheRefused):
    """The environment record of an image could not be read in a container of it."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    parser.add_argument("target", metavar=METAVAR, help="a cache file, a cache root or key, an image, or a registry")
    parser.add_argument(
        "--env", type=path, metavar="RECORD.json", help="compare with this record (FlashInfer's flat _metadata)"
    )
    parser.add_argument(
        "--live", action="store_true", help="compare in a container of IMAGE: its record, or a server's own hash"
    )
    parser.add_argument("--startup-max-wait", type=seconds, default=1200, metavar="S", help="timeout of --live, in s")
    parser.add_argument(
        "-e",
        dest="environment",
        action="append",
        default=[],
        metavar="N=V",
        help="a variable of a server's deployment; its arguments follow `--`",
    )
    parser.set_defaults(rest=())
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Explain; 0 where the cache would be used, 7 where it would not."""
    from pipeline.cache.environment import read_environment
    from pipeline.commands.locations import locate

    if arguments.env is not None and arguments.live:
        raise UsageError("--env and --live exclude each other", hint="give one of them")
    environment = read_environment(arguments.env) if arguments.env is not None else None
    location = locate(arguments.target)
    if arguments.live and location.kind != "image":
        raise UsageError(f"--live needs an IMAGE, not a {location.kind}", hint="or give the record with --env")
    if arguments.rest or arguments.environment:
        if location.kind != "image":
            raise UsageError(
                f"a server's arguments need an IMAGE, not a {location.kind}", hint="name the image that was warmed up"
            )
        return _explain_server(arguments)
    if location.kind == "path":
        found = _explain_path(location.path, environment)
    elif location.kind == "image":
        found = _explain_image(arguments.target, environment, arguments)
    else:
        from pipeline.cache.explain import explain_tree
        from pipeline.cache.tree import walk
        from pipeline.commands.locations import opened

        with opened(arguments.target) as root:
            found = explain_tree(walk(root), environment or here(), baked=False)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print("\n".join(found.lines()))
    return int(Exit.OK if found.verdict == "ok" else Exit.CACHE)


def _explain_server(arguments: argparse.Namespace) -> int:
    """Compare a deployment's words with those that were baked; 0 where nothing that counts differs."""
    import shlex

    from pipeline.commands.locations import image_in_engine
    from pipeline.daemon import find
    from pipeline.image.gpus import NO_GPUS, offered
    from pipeline.servers.containers import manifest_in, own_hashes
    from pipeline.servers.manifest import explain, report
    from pipeline.servers.words import Words, variables

    hashes: list[str] = []
    environment = variables(shlex.join(arguments.environment))
    with image_in_engine(arguments.target) as (client, image):
        told, _ = manifest_in(client, str(image.id))
        if arguments.live:
            engine = find()
            gpus = offered(engine) if engine is not None and told.device != "cpu" else NO_GPUS
            now = Words(told.server, tuple(arguments.rest), environment)
            hashes = own_hashes(client, str(image.id), told, now, gpus)
    found = explain(told, arguments.rest, environment)
    if arguments.json:
        print(json.dumps([{"name": d.name, "now": d.now, "baked": d.baked, "certain": d.certain} for d in found]))
    else:
        print("\n".join(report(told, found, hashes)))
    missed = any(one.certain for one in found) or (hashes and hashes[-1] not in hashes[:-1])
    return int(Exit.CACHE if missed else Exit.OK)


def _explain_path(path: Path, environment: Environment | None) -> Explanation:
    from pipeline.cache.explain import combine, explain_file, explain_tree
    from pipeline.contract.places import CACHE_FILE

    environment = environment or here()
    if not path.is_dir():
        return explain_file(path, environment)
    from pipeline.cache.tree import Tree, find_keys, read_key, walk
    from pipeline.contract.record import Key

    root = path.resolve()
    if os.path.lexists(root / CACHE_FILE):  # a key's own directory
        try:
            key = Key.parse("/".join(root.parts[-3:]))
        except CacheRefused:
            return explain_file(root / CACHE_FILE, environment)
        above = root.parents[2]
        return explain_tree(Tree(above, (read_key(above, key),)), environment, baked=False)
    if not find_keys(root):
        answers = [answer for file in loose_files(root) for answer in explain_file(file, environment).answers]
        if answers:
            return combine(answers)
    return explain_tree(walk(root), environment, baked=False)


def _explain_image(name: str, environment: Environment | None, arguments: argparse.Namespace) -> Explanation:
    from pipeline.cache.environment import from_record
    from pipeline.cache.explain import explain_tree
    from pipeline.cache.tree import walk
    from pipeline.commands.locations import image_in_engine, unpacked

    with image_in_engine(name) as (client, image), unpacked(client, image) as root:
        tree = walk(root)
        if arguments.live:
            gpus = any(not stored.key.arch.startswith("cpu-") for stored in tree.keys)
            record = live_record(client, image, gpus=gpus, max_wait=arguments.startup_max_wait)
            environment = from_record(record, f"a container of {name}")
        return explain_tree(tree, environment or here(), baked=True)


def live_record(client: DockerClient, image: Image, *, gpus: bool, max_wait: float) -> Record:
    """Read the whole record in a started container of the image, with all GPUs where `gpus`.

    Raises `RecordUnread` with the last lines of what it said, or `ContainerTimeout`.
    """
    from docker.errors import APIError

    from pipeline.contract.places import ENV_WORKSPACE
    from pipeline.contract.record import Record
    from pipeline.daemon import find
    from pipeline.image.containers import ContainerSpec, run_one, tuner_command
    from pipeline.image.gpus import NO_GPUS, offered
    from pipeline.image.replay import tuner_files

    engine = find()
    spec = ContainerSpec(
        environment={ENV_WORKSPACE: "/tmp/workspace"},  # noqa: S108 - in the container
        gpus=offered(engine) if gpus and engine is not None else NO_GPUS,
        files=tuner_files(),
    )
    command = tuner_command("pipeline.tune.record")
    try:
        ended = run_one(client, str(image.id), command, spec, timeout=max_wait)
    except APIError as error:  # no python3 in it, or no GPU for it
        raise RecordUnread(f"the container did not start: {error.explanation or error}") from error
    try:
        return Record.from_json(json.loads(ended.stdout.strip().splitlines()[-1])["record"])
    except (LookupError, ValueError, TypeError, CacheRefused) as error:
        raise RecordUnread(
            f"the record could not be read in the container (exit code {ended.status})",
            details=ended.stderr,
            hint="the image must have torch and FlashInfer",
        ) from error


def here() -> Environment:
    """As much of this host's environment as is known without torch: the processor, and the GPU's name by NVML."""
    from pipeline.cache.environment import Environment
    from pipeline.start.check import read_cpu
    from pipeline.start.nvml import NoNvml, read_gpus, visible

    try:
        names = [device.name for device in visible(read_gpus(), os.environ)]
        said = f"compared with this host's {names[0]}" if names else "no GPU is visible here"
    except NoNvml as error:
        names, said = [], f"no GPU here ({error}), so that only its processor was looked at"
    record = {"gpu": names[0]} if names else {}
    return Environment(record, cpu=read_cpu(), complete=False, source=said)


def loose_files(directory: Path) -> list[Path]:
    """Files below a directory that are named like caches, for layouts that are not ours; links are not followed."""
    found: list[Path] = []
    for folder, names, files in os.walk(directory, followlinks=False):
        names.sort()
        found += [Path(folder) / f for f in sorted(files) if f.startswith(_NAMES) and f.endswith(".json")]
        if len(found) > _MOST:
            raise UsageError(f"{directory} has more than {_MOST} cache files", hint="name one of its directories")
    return found
