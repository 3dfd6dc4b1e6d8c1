"""Integrity of a baked key: is it what its own manifest says?

Everything that can be known without FlashInfer or a GPU. `check` never stops at the first reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import CacheRefused, PipelineError
from pipeline.contract.manifest import Covered, FileFacts, Manifest
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.record import Key
from pipeline.contract.text import shown
from pipeline.flashinfer.ops import is_skipped

from .finding import Finding
from .judge import WILDCARD, compare
from .read import NEVER_WILD, CacheFile
from .tree import Stored, Tree, absent, files_of, sums, walk

_AGAIN = "tune again"
_SHOWN = 20


def check_root(root: Path) -> tuple[Tree, tuple[Finding, ...]]:
    """Walk a root and check every key; findings carry the key in `where`. Raises `FileMissing` for no directory."""
    tree = walk(root)
    found = list(tree.findings)
    if not tree.keys:
        found.append(Finding(shown(str(root)), "has no cache", "`pipeline build MODEL` makes one"))
    for stored in tree.keys:
        found.extend(check(stored))
    return tree, tuple(found)


def collect(roots: Sequence[Path]) -> tuple[Stored, ...]:
    """Check every cache root and return its keys, sorted. Raise `CacheRefused` with every reason of every root,
    or `FileMissing`.
    """
    findings: list[str] = []
    found: dict[Key, Stored] = {}
    for root in roots:
        tree, wrong = check_root(root)
        findings += [f"{root}: {finding}" for finding in wrong]
        for stored in tree.keys:
            if stored.key in found:
                findings += _clash(found[stored.key], stored)
            else:
                found[stored.key] = stored
    if findings:
        raise CacheRefused(
            f"{len(findings)} validation error{'s' * (len(findings) > 1)}: {findings[0]}",
            details=findings[:_SHOWN],
            hint="nothing was baked; `pipeline cache diff A B` compares two, `pipeline tune` makes one again",
        )
    return tuple(stored for _, stored in sorted(found.items()))


def manifest_of(stored: Stored) -> Manifest:
    """The manifest of a key that was checked."""
    assert stored.manifest is not None, "`collect` lets no key without one pass"
    return stored.manifest


def check(stored: Stored) -> tuple[Finding, ...]:
    """Every reason not to bake or use one key: what could not be read, and where manifest and file disagree."""
    found = list(stored.findings)
    if stored.manifest is not None:
        found.extend(_files(stored, stored.manifest))
        for part in _PARTS:
            found.extend(part(stored, stored.manifest))
    if stored.manifest is not None and stored.file is not None:
        found.extend(_against_file(stored, stored.manifest, stored.file))
    return tuple(found)


def _clash(one: Stored, two: Stored) -> list[str]:
    """The same key twice is fine when the contents are the same, else the files that differ are a finding."""
    before, after = sums(one.path), sums(two.path)
    if before == after:
        return []
    names = ", ".join(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
    return [f"{one.key} is in {one.path} and in {two.path} with different contents ({names})"]


def _say(stored: Stored, what: str, hint: str = _AGAIN) -> Finding:
    return Finding(str(stored.key), what, hint)


def _identity(stored: Stored, manifest: Manifest) -> Iterator[Finding]:
    key, record, plan = stored.key, manifest.record, manifest.plan
    if manifest.key != str(key):
        yield _say(stored, f"the manifest names the key {shown(manifest.key)}", "was the directory moved?")
    try:
        expected = str(manifest.expected_key())
    except PipelineError as error:
        yield _say(stored, error.message, error.hint)
    except KeyError as error:
        yield _say(stored, f"the record lacks {error}")
    else:
        if expected != str(key):
            yield _say(
                stored, f"the manifest's own inputs give the key {expected}", "the manifest was edited; tune again"
            )
    for what, value in (("plan", plan.arch), ("record", record.arch)):
        if value != key.arch:
            yield _say(stored, f"the {what} is for the architecture {shown(value)!r}")
    if plan.flashinfer_version != key.flashinfer_version:
        yield _say(stored, f"the plan is for FlashInfer {shown(plan.flashinfer_version)}")
    unknown = [name for name, value in record.flashinfer.items() if value in ("unknown", "None", "")]
    if not key.arch.startswith("cpu-") and "gpu" in unknown:
        yield _say(stored, "the record does not name the GPU", "tune where the GPU is visible")


def _ranks(stored: Stored, manifest: Manifest) -> Iterator[Finding]:
    world = manifest.plan.layout.world
    numbers = [rank.rank for rank in manifest.ranks]
    if len(numbers) != world or numbers != list(range(len(numbers))):
        yield _say(stored, f"tuned by the ranks {numbers}, the plan has {world}")
    gpus = manifest.record.host.gpus
    if gpus and len(gpus) != world:
        yield _say(stored, f"the record names {len(gpus)} GPUs for {world} ranks")
    kinds = sorted({rank.gpu for rank in manifest.ranks})
    if len(kinds) > 1:
        yield _say(stored, f"the ranks ran on different GPUs: {', '.join(map(shown, kinds))}", "use GPUs of one kind")
    for entry, owners in manifest.owners.items():
        if not owners or list(owners) != sorted(set(owners)) or not all(0 <= rank < world for rank in owners):
            yield _say(stored, f"entry {shown(entry)} is owned by the ranks {list(owners)} of {world}")


def _coverage(stored: Stored, manifest: Manifest) -> Iterator[Finding]:
    plan = manifest.plan
    wanted = {(op.name, bucket) for op in plan.ops for bucket in op.buckets if not is_skipped(op.op, plan.skip_ops)}
    if not wanted:
        yield _say(stored, "the plan tunes nothing")
    rows = [(row.op, row.bucket) for row in manifest.covered]
    for op, bucket in sorted(wanted - set(rows)):
        yield _say(stored, f"{shown(op)} at {bucket} tokens is planned and not covered")
    for op, bucket in sorted(set(rows) - wanted):
        yield _say(stored, f"{shown(op)} at {bucket} tokens is covered and not planned")
    seen = Counter((row.op, row.bucket, row.entry) for row in manifest.covered)  # an op may look up several entries
    for (op, bucket, _), count in sorted(seen.items()):
        if count > 1:
            yield _say(stored, f"{shown(op)} at {bucket} tokens is covered twice by one entry")


def _files(stored: Stored, manifest: Manifest) -> Iterator[Finding]:
    """Each file is there with its size and sha256, and there is no other."""
    present = set(files_of(stored.path))
    for name in sorted(present - set(manifest.files) - {MANIFEST_FILE}):
        yield _say(stored, f"{shown(name)} is not in the manifest", "remove it")
    if CACHE_FILE not in manifest.files:
        yield _say(stored, f"the manifest does not list {CACHE_FILE}")
    for name, facts in sorted(manifest.files.items()):
        path = stored.path / name
        if "/" in name or name in (".", "..", "", MANIFEST_FILE):
            yield _say(stored, f"the manifest lists a file named {shown(name)!r}")
        elif name not in present or absent(path):
            if name != CACHE_FILE or stored.file is not None:  # its absence is reported already
                yield _say(stored, f"{shown(name)} is in the manifest and not a file here")
        elif path.stat().st_size != facts.size:
            yield _say(stored, f"{shown(name)} has {path.stat().st_size} bytes, the manifest says {facts.size}")
        else:
            yield from _content(stored, name, facts)


def _content(stored: Stored, name: str, facts: FileFacts) -> Iterator[Finding]:
    try:
        same = sha256_file(stored.path / name) == facts.sha256
    except OSError as error:
        if name != CACHE_FILE or stored.file is not None:  # that one is reported already
            yield _say(stored, f"{shown(name)} cannot be read: {error.strerror}", "make it readable")
        return
    if not same:
        yield _say(
            stored, f"{shown(name)} does not have the sha256 that the manifest names", "it was changed; tune again"
        )


_PARTS: tuple[Callable[[Stored, Manifest], Iterator[Finding]], ...] = (_identity, _ranks, _coverage)


def _against_file(stored: Stored, manifest: Manifest, file: CacheFile) -> Iterator[Finding]:
    for field in compare(file.metadata, manifest.record.flashinfer) if file.metadata is not None else ():
        saved = shown(field.saved, 60)
        yield _say(
            stored, f"{field.name} is {saved} in the file and {shown(field.current, 60)} in the manifest's record"
        )
    for name, value in (file.metadata or {}).items():
        if value == WILDCARD and name not in NEVER_WILD:  # those are the file's own finding
            yield _say(stored, f"{shown(name)} is {WILDCARD!r} in the file: FlashInfer would not compare it")
    for row in manifest.covered:
        wrong = _wrong_row(row, file)
        if wrong:
            yield _say(stored, f"{shown(row.op)} at {row.bucket} tokens: {wrong}")
    for entry in sorted(set(manifest.owners) - set(file.entries)):
        yield _say(stored, f"owned entry {shown(entry)} is not in the file")
    for rank in manifest.ranks:
        held = sum(1 for entry in file.entries if rank.rank in manifest.owners.get(entry, (rank.rank,)))
        if rank.entries != held:
            yield _say(stored, f"rank {rank.rank} reported {rank.entries} entries, the file has {held} of its own")


def _wrong_row(row: Covered, file: CacheFile) -> str:
    entry = file.entries.get(row.entry)
    if entry is None:
        return f"entry {shown(row.entry)} is not in the file"
    if entry.runner != row.runner or entry.tactic != row.tactic:
        have, said = shown([entry.runner, entry.tactic], 80), shown([row.runner, row.tactic], 80)
        return f"the file has {have}, the manifest {said}"
    if entry.dropped:
        return f"FlashInfer drops {entry.runner} with an integer plan while loading"
    return "" if row.candidates > 0 else "no candidate was timed"
