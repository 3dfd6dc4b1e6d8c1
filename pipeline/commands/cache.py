"""`pipeline cache ls|diff|merge|export|prune|push|pull`: tuned caches as files, in the host's store, in a registry."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands import _cache_registry
from pipeline.contract.commandline import path, some
from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.cache.difference import Difference, Side

_PREFIX = "io.github.tuned-image-pipeline"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache`."""
    actions = parser.add_subparsers(dest="action", metavar="ls|diff|merge|export|prune|push|pull", required=True)
    ls = actions.add_parser("ls", help="list the keys in the host's store, a directory or an image")
    ls.add_argument("target", nargs="?", default="", metavar="DIR|IMAGE|oci:DIR", help="default: the host's store")
    ls.add_argument("--json", action="store_true", help="as JSON on stdout")
    diff = actions.add_parser("diff", help="compare two caches; exit 3 when they differ")
    diff.add_argument("a", metavar="A", help="a file, directory, image or oci:DIR")
    diff.add_argument("b", metavar="B")
    diff.add_argument("--json", action="store_true", help="as JSON on stdout")
    merge = actions.add_parser("merge", help="put several caches together; the same key with other contents is refused")
    merge.add_argument("inputs", nargs="+", metavar="IN", help="files, or directories, images and oci:DIR")
    merge.add_argument("out", type=path, metavar="OUT", help="the new file or directory")
    export = actions.add_parser("export", help="take the caches out of an image")
    export.add_argument("source", metavar="IMAGE|DIR")
    export.add_argument(
        "out", type=some, metavar="DIR|oci:DIR[:TAG]", help="a new directory: a cache root or an OCI layout"
    )
    prune = actions.add_parser("prune", help="remove caches from the host's store")
    prune.add_argument("--older-than", type=_days, metavar="DAYS", help="those made longer ago")
    prune.add_argument(
        "--max-size", type=_bytes, metavar="SIZE", help="unused ones, then the oldest, until the store fits (k, M, G)"
    )
    prune.add_argument("--unused", action="store_true", help="those that no image in the engine was baked from")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    _cache_registry.configure(actions)


def _days(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")


def _bytes(text: str) -> int:
    units = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
    number = text.rstrip("kKmMgG")
    unit = text[len(number) :].lower()
    if number.isdecimal() and unit in units:
        return int(number) * units[unit]
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: 500M, 2G")


def execute(arguments: argparse.Namespace) -> int:
    """Do one of the seven."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _ls,
        "diff": _diff,
        "merge": _merge,
        "export": _export,
        "prune": _prune,
        "push": _cache_registry.push,
        "pull": _cache_registry.pull,
    }
    return actions[arguments.action](arguments)


def _ls(arguments: argparse.Namespace) -> int:
    from pipeline import log
    from pipeline.cache.finding import shown
    from pipeline.commands._caches import looks_like_path, root_of
    from pipeline.commands._store import listing, stored, strays

    if arguments.target:
        with root_of(arguments.target) as root:
            rows, other = listing(root), strays(root)
        if not looks_like_path(arguments.target):  # of an image or a layout there was only a copy, gone by now
            rows = [{**row, "path": f"{arguments.target} {row['key']}"} for row in rows]
    else:
        entries = stored()
        rows = [row for entry in entries for row in listing(entry.root, entry)]
        other = [stray for entry in entries for stray in strays(entry.root)]
    for stray in other:
        log.warn(stray)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return int(Exit.OK)
    for row in rows:
        model, device, ended = (shown(row[name]) for name in ("model", "device", "ended"))
        head = f"{row['key']}\n  {model or '?'} on {device or '?'}, {row['ranks']} ranks, "
        print(
            f"{head}{row['entries']} entries, {row['bytes']} bytes, {ended or 'no date'}\n  {shown(row['path'], 4096)}"
        )
        for finding in row["findings"]:
            print(f"  UNSOUND: {finding}")
    if not rows:
        log.note("no tuned cache is here; `make image MODEL=…` makes one")
    return int(Exit.OK)


def _diff(arguments: argparse.Namespace) -> int:
    pairs, alone = _pairs(arguments.a, arguments.b)
    same = not alone and all(pair.same for pair in pairs)
    if arguments.json:
        whole: dict[str, Any] = pairs[0].to_json() if len(pairs) == 1 and not alone else {}
        if not whole:
            whole = {"same": same, "keys": [pair.to_json() for pair in pairs], "alone": alone}
        print(json.dumps(whole, indent=2))
    else:
        for pair in pairs:
            print("\n".join(pair.lines()))
        for name, key in alone:
            print(f"only in {name}: {key}")
    return int(Exit.OK if same else Exit.DRIFT)


def _pairs(a: str, b: str) -> tuple[list[Difference], list[tuple[str, str]]]:
    """Compare by key; two caches of one key each are compared whatever their keys are."""
    from pipeline.cache.difference import difference

    with _sides(a) as left, _sides(b) as right:
        if len(left) == 1 and len(right) == 1:
            return [difference(*left.values(), *right.values())], []
        alone = [(a, key) for key in left if key not in right] + [(b, key) for key in right if key not in left]
        return [difference(left[key], right[key]) for key in left if key in right], alone


@contextlib.contextmanager
def _sides(target: str) -> Iterator[dict[str, Side]]:
    from pipeline.cache.difference import Side
    from pipeline.cache.read import read_cache
    from pipeline.cache.tree import walk
    from pipeline.commands._caches import NoCacheInImage, looks_like_path, root_of

    if not target.startswith("oci:") and looks_like_path(target) and not Path(target).is_dir():
        yield {target: Side.of(target, read_cache(Path(target)), _manifest_beside(Path(target)))}
        return
    with root_of(target) as root:
        tree = walk(root)
        if not tree.keys:
            raise NoCacheInImage(f"{target} holds no cache", hint="a cache root holds <version>/<arch>/<hash>/")
        yield {
            str(one.key): Side.of(f"{target} {one.key}", read_cache(one.cache_path, where=str(one.key)), one.manifest)
            for one in tree.keys
        }


def _manifest_beside(path: Path) -> Any:  # noqa: ANN401 - a Manifest, or None
    from pipeline.cache.tree import load_manifest
    from pipeline.contract.errors import PipelineError
    from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

    if path.name != CACHE_FILE:
        return None
    try:
        return load_manifest(path.with_name(MANIFEST_FILE))
    except PipelineError:
        return None


def _merge(arguments: argparse.Namespace) -> int:
    from pipeline import log
    from pipeline.cache.read import read_cache
    from pipeline.cache.union import merge_files, merge_roots, write_file
    from pipeline.commands._caches import root_of
    from pipeline.versions.findings import counted

    out: Path = arguments.out
    if all(Path(name).is_file() for name in arguments.inputs):
        value = merge_files([(name, read_cache(Path(name), where=name)) for name in arguments.inputs])
        write_file(value, out)
        log.note(f"{out}: {sum(1 for key in value if not key.startswith('_'))} entries")
        return int(Exit.OK)
    with contextlib.ExitStack() as stack:
        roots = [(name, stack.enter_context(root_of(name))) for name in arguments.inputs]
        keys = merge_roots(roots, out)
    log.note(f"{out}: {counted(len(keys), 'key')}")
    for key in keys:
        print(key)
    return int(Exit.OK)


def _export(arguments: argparse.Namespace) -> int:
    import tempfile

    from pipeline import log
    from pipeline.cache.oci import write_layout
    from pipeline.cache.tree import walk
    from pipeline.cache.union import merge_roots
    from pipeline.commands._caches import root_of, split_oci
    from pipeline.versions.findings import counted

    with root_of(arguments.source) as root, tempfile.TemporaryDirectory(prefix="export-") as temporary:
        if not arguments.out.startswith("oci:"):
            keys = merge_roots([(arguments.source, root)], Path(arguments.out))
            log.note(f"{arguments.out}: {counted(len(keys), 'key')}; bake it with CACHE={arguments.out}")
        else:
            made = Path(temporary) / "root"
            keys = merge_roots([(arguments.source, root)], made)  # checks, and takes what belongs
            layout, tag = split_oci(arguments.out)
            arch = walk(made).keys[0].key.arch
            machine = arch.removeprefix("cpu-") if arch.startswith("cpu-") else platform.machine()
            labels = {
                "org.opencontainers.image.title": "tuned caches",
                "io.github.tuned-image-pipeline.keys": ",".join(keys),
            }
            written = write_layout(
                made, layout, tag=tag or "latest", architecture=_MACHINES.get(machine, machine), labels=labels
            )
            log.note(f"{layout}: image {written.manifest}, layer {written.layer}")
    for key in keys:
        print(key)
    return int(Exit.OK)


def _prune(arguments: argparse.Namespace) -> int:
    from pipeline import log
    from pipeline.commands._store import remove, select, stored, used_manifests
    from pipeline.contract.errors import DockerError, UsageError
    from pipeline.versions.findings import counted

    if arguments.older_than is None and arguments.max_size is None and not arguments.unused:
        raise UsageError("nothing says what to remove", hint="--older-than DAYS, --max-size SIZE, --unused")
    try:
        used = used_manifests()
    except DockerError as error:
        if arguments.unused:
            raise
        log.note(f"{error.message}: age alone decides")
        used = set()
    chosen = select(
        stored(), older_than=arguments.older_than, max_size=arguments.max_size, unused=arguments.unused, used=used
    )
    for entry, why in chosen:
        print(f"{entry.place.name}  {entry.size} bytes  {why}")
        if not arguments.dry_run:
            remove(entry)
    verb = "would remove" if arguments.dry_run else "removed"
    log.note(f"{verb} {counted(len(chosen), 'cache')}, {sum(entry.size for entry, _ in chosen)} bytes")
    return int(Exit.OK)
