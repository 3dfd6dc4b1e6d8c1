"""`pipeline explain FILE|DIR|IMAGE`: would this cache be used here, and if not, why?"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.bounds import seconds
from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.cache.environment import Environment
    from pipeline.cache.explain import Explanation


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    parser.add_argument("target", metavar="FILE|DIR|IMAGE", help="a cache file, a cache root or key, or an image")
    parser.add_argument(
        "--env", type=path, metavar="RECORD.json", help="compare with this record (FlashInfer's flat _metadata)"
    )
    parser.add_argument("--live", action="store_true", help="compare with the record that a container of IMAGE reads")
    parser.add_argument("--startup-max-wait", type=seconds, default=1200, metavar="S", help="bound of --live, in s")
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Explain; 0 where the cache would be used, 7 where it would not."""
    from pipeline.cache.environment import read_environment
    from pipeline.commands._caches import looks_like_path
    from pipeline.contract.errors import UsageError

    if arguments.env is not None and arguments.live:
        raise UsageError("--env and --live exclude each other", hint="give one of them")
    environment = read_environment(arguments.env) if arguments.env is not None else None
    if looks_like_path(arguments.target):
        if arguments.live:
            raise UsageError("--live needs an IMAGE, and a path was given", hint="or give the record with --env")
        found = _explain_path(Path(arguments.target), environment)
    else:
        found = _explain_image(arguments.target, environment, arguments)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print("\n".join(found.lines()))
    return int(Exit.OK if found.verdict == "ok" else Exit.CACHE)


def _explain_path(path: Path, environment: Environment | None) -> Explanation:
    from pipeline.cache.explain import combine, explain_file, explain_tree
    from pipeline.commands._caches import here, loose_files
    from pipeline.contract.places import CACHE_FILE

    environment = environment or here()
    if not path.is_dir():
        return explain_file(path, environment)
    from pipeline.cache.tree import Tree, find_keys, read_key, walk
    from pipeline.contract.errors import CacheRefused
    from pipeline.contract.key import Key

    root = path.resolve()
    if os.path.lexists(root / CACHE_FILE):  # a key's own directory
        try:
            key = Key.parse("/".join(root.parts[-3:]))
        except CacheRefused:
            return explain_file(root / CACHE_FILE, environment)
        above = root.parents[2]
        return explain_tree(Tree(above, (read_key(above, key),)), environment, baked=False)
    if not find_keys(root):
        from pipeline.cache.enginegroups import engine_groups, explain_group

        groups = engine_groups(root)
        grouped = {one.path for group in groups for one in group.files}
        answers = [explain_group(group, environment) for group in groups]
        loose = [file for file in loose_files(root) if file not in grouped]
        answers += [answer for file in loose for answer in explain_file(file, environment).answers]
        if answers:
            return combine(answers)
    return explain_tree(walk(root), environment, baked=False)


def _explain_image(name: str, environment: Environment | None, arguments: argparse.Namespace) -> Explanation:
    from pipeline.cache.environment import from_record
    from pipeline.cache.explain import explain_tree
    from pipeline.cache.tree import walk
    from pipeline.commands._caches import here, image_in_engine, live_record, unpacked

    with image_in_engine(name) as (client, image), unpacked(client, image) as root:
        tree = walk(root)
        if arguments.live:
            gpus = any(not stored.key.arch.startswith("cpu-") for stored in tree.keys)
            record = live_record(client, image, gpus=gpus, max_wait=arguments.startup_max_wait)
            environment = from_record(record, f"a container of {name}")
        return explain_tree(tree, environment or here(), baked=True)
