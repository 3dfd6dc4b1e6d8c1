"""`pipeline cache ls|diff|merge|export`: caches as files."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.locations import METAVAR, locate, opened
from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.cache.difference import Difference, Side


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache ls`."""
    parser.add_argument("target", nargs="?", default="", metavar=METAVAR, help="default: the host's store")
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute_ls(arguments: argparse.Namespace) -> int:
    """List keys, one block each."""
    from pipeline import log
    from pipeline.commands.cache.store import rows_of, rows_of_store, stored, strays

    if arguments.target:
        with opened(arguments.target) as root:
            rows, other = rows_of(root), strays(root)
        if locate(arguments.target).kind != "path":  # there was only a copy, gone by now
            rows = [{**row, "path": f"{arguments.target} {row['key']}"} for row in rows]
    else:
        rows, other = rows_of_store(), [stray for entry in stored() for stray in strays(entry.root)]
    for stray in other:
        log.warn(stray)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return int(Exit.OK)
    for row in rows:
        print("\n".join(_block(row)))
    if not rows:
        log.note("no cache is here; `pipeline build MODEL` makes one")
    return int(Exit.OK)


def _block(row: dict[str, Any]) -> Iterator[str]:
    from pipeline.contract.text import shown

    model, device, ended = (shown(row[name]) for name in ("model", "device", "ended"))
    yield row["key"] or f"warm-up {row['inputs']}"
    about = f"{model or '?'} on {device or '?'}, {row['ranks']} ranks, {row['entries']} entries, " if row["key"] else ""
    yield f"  {about}{row['bytes']} bytes, {ended or 'no date'}"
    if row.get("inputs"):
        kinds = ", ".join(f"{shown(kind, 40)} {size} bytes" for kind, size in row.get("kinds", {}).items())
        yield f"  entry {row['inputs']}" + (f": {kinds}" if kinds else "")
    yield f"  {shown(row['path'], 4096)}"
    yield from (f"  UNSOUND: {finding}" for finding in row["findings"])


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache inspect`."""
    parser.add_argument("target", metavar=METAVAR, help="a cache file, a cache root or key, an image, or a registry")
    parser.add_argument("--key", default="", metavar="HASH", help="only the key whose hash begins so")
    parser.add_argument("--json", action="store_true", help="manifests, entries and findings as JSON on stdout")


def execute_inspect(arguments: argparse.Namespace) -> int:
    """Print what each key is, where it was made, and what it answers; exit 7 where something is wrong with it."""
    from pipeline.commands.cache.inspect import described, lines_of

    location = locate(arguments.target)
    with contextlib.ExitStack() as stack:
        single = location.kind == "path" and not location.path.is_dir()
        found = described(location.path if single else stack.enter_context(opened(arguments.target)), arguments.key)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(line for one in found for line in lines_of(one)))
    return int(Exit.CACHE if any(one["findings"] for one in found) else Exit.OK)


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache diff`."""
    parser.add_argument("a", metavar="A", help=f"a cache file, or {METAVAR}")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute_diff(arguments: argparse.Namespace) -> int:
    """Print what differs; exit 3 where anything does."""
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
    from pipeline.commands.locations import NoCacheInImage

    location = locate(target)
    if location.kind == "path" and not location.path.is_dir():
        yield {target: Side.of(target, read_cache(location.path, where=target), _manifest_beside(location.path))}
        return
    with opened(target) as root:
        tree = walk(root)
        if not tree.keys:
            raise NoCacheInImage(f"{target} has no cache", hint="a cache root has <version>/<arch>/<hash>/")
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


def configure_merge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache merge`."""
    parser.add_argument("inputs", nargs="+", metavar="IN", help=f"cache files, or each {METAVAR}")
    add_output(parser, "the new file or directory")


def execute_merge(arguments: argparse.Namespace) -> int:
    """Write the union; print its keys."""
    from pipeline import log
    from pipeline.cache.read import read_cache
    from pipeline.cache.union import merge_files, write_file

    out: Path = arguments.output
    if all(Path(name).is_file() for name in arguments.inputs):
        value = merge_files([(name, read_cache(Path(name), where=name)) for name in arguments.inputs])
        write_file(value, out)
        log.note(f"{out}: {sum(1 for key in value if not key.startswith('_'))} entries")
        return int(Exit.OK)
    return _copied(arguments.inputs, out)


def configure_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache export`."""
    parser.add_argument("source", metavar=METAVAR)
    add_output(parser, "a new directory: a cache root")


def execute_export(arguments: argparse.Namespace) -> int:
    """Write what belongs to the caches into a new directory; print the keys."""
    return _copied([arguments.source], arguments.output)


def _copied(sources: Sequence[str], out: Path) -> int:
    from pipeline import log
    from pipeline.cache.union import merge_roots
    from pipeline.versions.findings import counted

    with contextlib.ExitStack() as stack:
        keys = merge_roots([(name, stack.enter_context(opened(name))) for name in sources], out)
    log.note(f"{out}: {counted(len(keys), 'key')}; `pipeline build MODEL --cache {out}` bakes them")
    for key in keys:
        print(key)
    return int(Exit.OK)


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the required `-o`."""
    parser.add_argument("-o", "--output", type=path, required=True, metavar="OUT", help=what)
