"""`pipeline cache ls|inspect|diff|merge|export|add`: caches as files and in images."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.cache.difference import Difference, Side, difference
from pipeline.cache.entrykey import op_and_runner
from pipeline.cache.integrity import check
from pipeline.cache.read import CacheFile, inspect_cache, read_cache
from pipeline.cache.tree import manifest_beside, misplaced, walk
from pipeline.cache.union import merge_files, merge_roots, write_file
from pipeline.commands.cache.store import rows_of, rows_of_store, stored, strays
from pipeline.commands.locations import METAVAR, NoCacheInImage, locate, opened
from pipeline.contract.commandline import path
from pipeline.contract.errors import Exit, UsageError
from pipeline.contract.text import pluralize, shown


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache ls`."""
    parser.add_argument("target", nargs="?", default="", metavar=METAVAR, help="default: the host's store")
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute_ls(arguments: argparse.Namespace) -> int:
    """List keys, one block each."""

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
    model, device, ended = (shown(row[name]) for name in ("model", "device", "ended"))
    yield row["key"] or f"warm-up {row['inputs']}"
    about = f"{model or '?'} on {device or '?'}, {pluralize(row['ranks'], 'rank')}, {_entries(row['entries'])}, "
    about = about if row["key"] else ""
    yield f"  {about}{row['bytes']} bytes, {ended or 'no date'}"
    if row.get("inputs"):
        kinds = ", ".join(f"{shown(kind, 40)} {size} bytes" for kind, size in row.get("kinds", {}).items())
        yield f"  entry {row['inputs']}" + (f": {kinds}" if kinds else "")
    yield f"  {shown(row['path'], 4096)}"
    yield from (f"  UNSOUND: {finding}" for finding in row["findings"])


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache inspect`."""
    parser.add_argument("target", metavar=METAVAR, help="a cache file, a cache root or key, an image, or a registry")
    parser.add_argument("--key", default="", metavar="HASH", help="only the key whose hash begins with HASH")
    parser.add_argument("--json", action="store_true", help="manifests, entries and findings as JSON on stdout")


def execute_inspect(arguments: argparse.Namespace) -> int:
    """Print what each key is, where it was made, and what it answers; exit 7 where something is wrong with it."""
    location = locate(arguments.target)
    with contextlib.ExitStack() as stack:
        single = location.kind == "path" and not location.path.is_dir()
        found = _described(location.path if single else stack.enter_context(opened(arguments.target)), arguments.key)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(line for one in found for line in _lines_of(one)))
    return int(Exit.CACHE if any(one["findings"] for one in found) else Exit.OK)


def _described(place: Path, key: str = "") -> list[dict[str, Any]]:
    """Each key below a root, or the one file, as JSON values. Raises `UsageError` or `NoCacheInImage` where none is."""
    if not place.is_dir():
        if key:
            raise UsageError(f"{place} is one file, and --key chooses among several", hint="leave --key out")
        file = inspect_cache(place)
        return [{"key": "", "manifest": None, **_contents(file), "findings": [str(one) for one in file.findings]}]
    keys = [one for one in walk(place).keys if one.key.hash.startswith(key)]
    if key and not keys:
        raise UsageError(f"no key there begins with {key!r}", hint="`pipeline cache ls` lists keys")
    if not keys:
        raise _no_cache(str(place), place)
    return [
        {
            "key": str(one.key),
            "manifest": one.manifest.to_json() if one.manifest is not None else None,
            **_contents(one.file),
            "findings": [str(finding) for finding in check(one)],
        }
        for one in keys
    ]


def _no_cache(name: str, root: Path) -> NoCacheInImage:
    """What to raise for a root without keys: also what lies there instead, or may not be read."""
    strange = misplaced(root)[:1]
    why, hint = (f": {strange[0]}", strange[0].hint) if strange else ("", "a cache root has <version>/<arch>/<hash>/")
    return NoCacheInImage(f"{shown(name)} has no cache{why}", hint=hint)


def _contents(file: CacheFile | None) -> dict[str, Any]:
    if file is None:
        return {"record": {}, "entries": {}}
    counts = Counter(op_and_runner(key) for key in file.entries)
    entries: dict[str, dict[str, int]] = {}
    for (op, runner), count in sorted(counts.items()):
        entries.setdefault(op, {})[runner] = count
    return {"record": dict(file.metadata or {}), "entries": entries}


def _lines_of(found: dict[str, Any]) -> Iterator[str]:
    """One key for people."""
    manifest = found["manifest"]
    if found["key"]:
        yield found["key"]
    if manifest is not None:
        plan, host = manifest["plan"], manifest["record"]["host"]
        layout = " ".join(f"{name}={size}" for name, size in plan["layout"].items())
        device = ", ".join(dict.fromkeys(host["gpus"])) or host["cpu"].get("model", "?")
        yield f"  model     {shown(plan['model'])} ({layout}), plan {plan['digest'][:12]}"
        yield f"  device    {shown(device)}, driver {shown(host['driver'] or '?')}"
        yield f"  made      {shown(manifest['started'])} to {shown(manifest['ended'])}, {shown(manifest['strategy'])}"
        yield f"  ranks     {len(manifest['ranks'])}, {sum(rank['entries'] for rank in manifest['ranks'])} entries"
    for name, value in found["record"].items():
        yield f"  record    {shown(name, 40)} {shown(value, 80)}"
    for op, runners in found["entries"].items():
        counts = ", ".join(f"{shown(runner, 60)} {count}" for runner, count in runners.items())
        yield f"  entries   {shown(op or 'unreadable keys', 60)}: {counts}"
    for note in (manifest or {}).get("notes", ()):
        yield f"  note      {shown(note, 400)}"
    yield from (f"  UNSOUND   {finding}" for finding in found["findings"])


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
    with _sides(a) as left, _sides(b) as right:
        if len(left) == 1 and len(right) == 1:
            return [difference(*left.values(), *right.values())], []
        alone = [(a, key) for key in left if key not in right] + [(b, key) for key in right if key not in left]
        return [difference(left[key], right[key]) for key in left if key in right], alone


@contextlib.contextmanager
def _sides(target: str) -> Iterator[dict[str, Side]]:
    location = locate(target)
    if location.kind == "path" and not location.path.is_dir():
        yield {target: Side.of(target, read_cache(location.path, where=target), manifest_beside(location.path))}
        return
    with opened(target) as root:
        tree = walk(root)
        if not tree.keys:
            raise _no_cache(target, root)
        yield {
            str(one.key): Side.of(f"{target} {one.key}", read_cache(one.cache_path, where=str(one.key)), one.manifest)
            for one in tree.keys
        }


def configure_merge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache merge`."""
    parser.add_argument("inputs", nargs="+", metavar="IN", help=f"cache files, or each {METAVAR}")
    add_output(parser, "the new file or directory")


def execute_merge(arguments: argparse.Namespace) -> int:
    """Write the union; print its keys."""
    out: Path = arguments.output
    files = [name for name in arguments.inputs if Path(name).is_file()]
    others = [name for name in arguments.inputs if name not in files]
    if files and others:
        raise UsageError(
            f"{files[0]} is a file, and {others[0]} is none", hint="merge files with files, roots with roots"
        )
    if files:
        value = merge_files([(name, read_cache(Path(name), where=name)) for name in arguments.inputs])
        write_file(value, out)
        log.note(f"{out}: {_entries(sum(1 for key in value if not key.startswith('_')))}")
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
    with contextlib.ExitStack() as stack:
        keys = merge_roots([(name, stack.enter_context(opened(name))) for name in sources], out)
    log.note(f"{out}: {pluralize(len(keys), 'key')}; `pipeline build MODEL --cache {out}` bakes them")
    for key in keys:
        print(key)
    return int(Exit.OK)


def configure_add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache add`."""
    from pipeline.image.request import add_result_options

    parser.add_argument(
        "of", metavar="IMAGE", help="an image in the Docker Engine, with /opt/pipeline, torch and FlashInfer"
    )
    parser.add_argument("cache", metavar="CACHE", nargs="+", help="a directory, an image, or oci://…")
    add_result_options(parser)


def execute_add(arguments: argparse.Namespace) -> int:
    """Check the caches, add them, verify, tag."""
    from pipeline.commands.locations import image_in_engine
    from pipeline.commands.report import summarize
    from pipeline.contract.errors import CacheRefused
    from pipeline.image.names import PRODUCER, check_image_name, check_reference
    from pipeline.image.request import request_to_add
    from pipeline.image.road import build_image

    check_reference(arguments.of)
    check_image_name(arguments.image)
    with image_in_engine(arguments.of) as (_, image):
        server = image.labels.get(PRODUCER, "tune")
    if server != "tune":
        raise CacheRefused(
            f"{arguments.of} was warmed up by {server}'s own start, which makes all its caches on one GPU type",
            hint=f"build another image: SERVER={server}",
        )
    with contextlib.ExitStack() as stack:
        roots = [stack.enter_context(opened(cache)) for cache in arguments.cache]
        timeout = float(arguments.startup_max_wait)
        outcome = build_image(request_to_add(arguments.of, roots, name=arguments.image, timeout=timeout))
    if arguments.json:
        print(json.dumps(outcome.to_json(), indent=2))
    summarize(outcome)
    return 0


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the required `-o`."""
    parser.add_argument("-o", "--output", type=path, required=True, metavar="OUT", help=what)
