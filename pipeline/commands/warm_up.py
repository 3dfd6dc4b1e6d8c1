"""`pipeline warm-up MODEL --in-place DIR`: a server's first start, inside a container that a cluster started."""

from __future__ import annotations

import argparse
import json

from pipeline import log
from pipeline.contract.commandline import path, seconds
from pipeline.contract.errors import Exit


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warm-up`."""
    parser.add_argument("model", metavar="MODEL", help="a bundled model, a model's folder or config.json, or a hub id")
    parser.add_argument(
        "--in-place", type=path, required=True, metavar="DIR", help="start the server here, and write its caches to DIR"
    )
    parser.add_argument("--server", required=True, choices=("vllm", "sglang"), help="which server this image has")
    parser.add_argument(
        "--server-args", required=True, metavar="ARGS", help="its arguments, as in production; several sets: A -- B"
    )
    parser.add_argument("--server-env", default="", metavar="N=V …", help="its variables; a secret by name alone")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="what it runs on (default: cuda)")
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1800, metavar="S", help="timeout of one start (default: 1800)"
    )
    parser.add_argument("--json", action="store_true", help="what was written as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Warm up here; 0 where the folder is complete."""
    from pipeline.servers import words
    from pipeline.servers.in_place import warm_up_in_place
    from pipeline.servers.model import read_model
    from pipeline.servers.producer import ServerProducer

    sets = words.parse(arguments.server, arguments.server_args, arguments.server_env)
    model = read_model(arguments.model)
    for note in model.notes:
        log.note(note)
    producer = ServerProducer(sets, model.files, model.name, arguments.device)
    warm = warm_up_in_place(producer, arguments.in_place, ready=float(arguments.startup_max_wait))
    if arguments.json:
        caches = [{"kind": one.kind, "path": one.path, "bytes": one.bytes} for one in warm.caches]
        print(json.dumps({"folder": str(arguments.in_place), "seconds": warm.seconds, "caches": caches}, indent=2))
    return int(Exit.OK)
