"""The files of a key that an engine made, held against the engine's own rule and against the key's manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.contract.errors import PipelineError
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import ENGINE_DIR

from .finding import Finding
from .judge import compare
from .layouts import layout_of
from .layouts.collected import collect
from .layouts.group import Group
from .tree import Stored

STORE_NOTE = (
    "FlashInfer's managed store compares nothing: where a field differs it looks in another directory, without a "
    "warning, and tunes into that"
)


def engine_notes(manifest: Manifest | None) -> tuple[str, ...]:
    """What one must know of a key that an engine made; nothing for others."""
    if manifest is None or manifest.plan.engine is None:
        return ()
    run, described = manifest.plan.engine, layout_described(manifest)
    note = (
        f"{run.name} {run.version} made it in its own start and reads its own files, which a start with `pipeline-run` "
        f"copies for it ({described.get('variable')}); they serve {run.model} with the arguments of the manifest"
    )
    return (note, STORE_NOTE) if str(described.get("directory")).startswith("v2/") else (note,)


def engine_findings(stored: Stored, manifest: Manifest) -> Iterator[Finding]:
    """Every reason why the engine would not use its files; nothing for a key that no engine made."""
    run, described = manifest.plan.engine, layout_described(manifest)
    if run is None:
        if described or (stored.path / ENGINE_DIR).exists():
            yield _say(stored, "it holds an engine's files, and its plan names no engine")
        return
    if described.get("engine") != run.name:
        yield _say(stored, f"its manifest describes no layout of {run.name}")
        return
    group = group_of(stored, manifest)
    if group is None:
        yield _say(stored, f"{ENGINE_DIR}/ does not hold the files of one start of {run.name}")
        return
    for said in layout_of(run.name).check(group):
        yield _say(stored, said)
    yield from _against_union(stored, manifest, group)


def layout_described(manifest: Manifest) -> dict[str, Any]:
    """`options["layout"]` of a manifest; empty where there is none."""
    found = manifest.options.get("layout")
    return dict(found) if isinstance(found, dict) else {}


def group_of(stored: Stored, manifest: Manifest) -> Group | None:
    """The one group of files below a key's `engine` directory; None where there is not exactly one, as described."""
    described = layout_described(manifest)
    try:
        groups = layout_of(str(described.get("engine"))).gather(str(stored.path / ENGINE_DIR))
    except PipelineError:
        return None
    return groups[0] if len(groups) == 1 and groups[0].directory == described.get("directory") else None


def _against_union(stored: Stored, manifest: Manifest, group: Group) -> Iterator[Finding]:
    found = collect(group, len(manifest.ranks))
    for one, file in found.files:
        for field in compare(file.metadata, manifest.record.flashinfer):
            yield _say(stored, f"{one.path.name}: {field.name} is not what the manifest's record says")
    if len(found.files) not in (1, len(manifest.ranks)):
        yield _say(stored, f"{len(found.files)} files for {len(manifest.ranks)} ranks")
    held = tuple(rank.entries for rank in manifest.ranks)
    if held != found.held:
        yield _say(stored, f"the ranks' files hold {list(found.held)} entries, the manifest says {list(held)}")
    if stored.file is not None:
        ours = {key: (entry.runner, entry.tactic) for key, entry in stored.file.entries.items()}
        theirs = {key: (entry.runner, entry.tactic) for key, entry in found.entries.items()}
        if ours != theirs:
            yield _say(stored, f"{stored.cache_path.name} is not the union of the engine's files")


def _say(stored: Stored, what: str) -> Finding:
    return Finding(str(stored.key), what, "tune again")
