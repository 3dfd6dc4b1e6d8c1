"""A release: which cells there are and what the registry has of them; running and finishing them.

`run` needs a Docker Engine only for what is not released yet; `cells`, `finish` and a dry run need none.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline import log
from pipeline.contract.digest import canonical_json, sha256_json
from pipeline.contract.errors import Exit, PipelineError, PublishError, UsageError
from pipeline.contract.text import shown
from pipeline.home import cache_home
from pipeline.image.names import INPUTS as WARM_UP
from pipeline.image.names import KEY, PREFIX
from pipeline.image.request import Request
from pipeline.image.session import Session
from pipeline.project import root
from pipeline.registry.client import Registry, parallel_map
from pipeline.registry.descriptors import INDEX, Manifest
from pipeline.registry.errors import InvalidResponse, NotFound
from pipeline.registry.reference import Reference

from . import attachments, cosign, tags, verdicts
from .building import build, engine, ranks_of
from .images import ImageIndex, read_image
from .matrix import Cell
from .publish import Publisher, exports, give_tag, move_tag
from .tags import GPU, INPUTS, revision_annotations

Status = Literal["pushed", "would push", "released", "failed", "interrupted"]
_AT_ONCE = 4  # cells that are looked up at the same time


@dataclass(frozen=True)
class Options:
    """Where to, under which names, and with what beside the images. `place` is registry and repository."""

    place: Reference
    template: str = ""
    floating: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    signer: cosign.Signer | None = None
    verdicts: tuple[Path, ...] = ()
    compression: str = ""
    again: bool = False  # tune again: what is there already does not count

    def template_of(self, cell: Cell) -> str:
        """The template of a cell's tag."""
        return self.template or (tags.DEFAULT_WITH_SERVER if cell.server else tags.DEFAULT)


@dataclass(frozen=True)
class Job:
    """A cell with its request and inputs digest, or with the error that it fails with."""

    cell: Cell
    request: Request | None = None
    inputs: str = ""
    error: PipelineError | None = None


@dataclass(frozen=True)
class Row:
    """What came of one cell. `why` says why it failed; `code` is the exit code of that."""

    cell: str
    status: Status
    image: str = ""  # registry/repository:tag, or @digest where it has no tag of its own
    digest: str = ""
    why: str = ""
    hint: str = ""
    code: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Summary:
    """All rows, and the tags that were given or moved by the finish."""

    registry: str
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """0, the exit code that all failing cells share, or that of publishing."""
        codes = {row.code for row in self.rows if row.status == "failed"}
        return int(Exit.OK) if not codes else codes.pop() if len(codes) == 1 else int(Exit.PUBLISH)

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        return {
            "registry": self.registry,
            "exit_code": self.code,
            "cells": [asdict(row) for row in self.rows],
            "tags": list(self.tags),
        }

    def show(self) -> None:
        """Write a table to stderr, the hints, and one line that counts."""
        table = [("cell", "status", "image", "digest or reason")]
        table += [(r.cell, r.status, r.image, shown(r.why, 300) if r.why else r.digest) for r in self.rows]
        widths = [max(len(row[at]) for row in table) for at in range(3)]
        for row in table:
            padded = [word.ljust(width) for word, width in zip(row, widths, strict=False)]
            log.line("  ".join([*padded, row[3]]).rstrip())
        for hint in dict.fromkeys(row.hint for row in self.rows if row.hint):
            log.line(f"hint: {hint}")
        counts = Counter(row.status for row in self.rows)
        counted = ", ".join(f"{number} {status}" for status, number in counts.items())
        log.line(f"{self.registry}: {counted or 'nothing to release'}")


class Release:
    """One call. `rows` fills as cells end, so that a run that is interrupted can still say how far it came."""

    def __init__(self, options: Options, jobs: Sequence[Job]) -> None:
        self.options = options
        self.jobs = list(jobs)
        self.rows: dict[str, Row] = {}
        self.tags: list[str] = []

    def summary(self) -> Summary:
        """What came of every cell; those that were not reached are `interrupted`."""
        rest = [Row(job.cell.name, "interrupted", why="not reached") for job in self.jobs]
        return Summary(self.options.place.name, tuple(self.rows.get(row.cell, row) for row in rest), tuple(self.tags))

    # What is released

    def cells(self, registry: Registry, command: Sequence[str]) -> list[dict[str, Any]]:
        """Each cell for a CI system: its name, what a host must have, its command, and what the registry has of it."""
        found = self._look(registry, self.jobs)
        return [
            {
                "name": job.cell.name,
                "device": _device(job),
                "gpu": job.cell.gpu,
                "gpu_count": self._gpu_count(job),
                "platform": job.cell.platform,
                "command": [*command, "--cell", job.cell.name],
                "inputs": job.inputs,
                "released": isinstance(there, ImageIndex),
                "digest": there.digest if isinstance(there, ImageIndex) else "",
                "error": job.error.message if job.error is not None else "",
            }
            for job, there in zip(self.jobs, found, strict=True)
        ]

    def _gpu_count(self, job: Job) -> int:
        """How many GPUs a host needs; none for caches that were tuned elsewhere and come with a verdict."""
        elsewhere = job.cell.caches and (job.cell.verdicts or self.options.verdicts)
        return 0 if elsewhere or job.request is None or job.request.device != "cuda" else ranks_of(job.request)

    def _look(self, registry: Registry, jobs: Sequence[Job]) -> list[ImageIndex | PipelineError | None]:
        """What is released already of each job, or why that is not known."""

        def look(job: Job) -> ImageIndex | PipelineError | None:
            try:
                return None if job.error is not None else self._released(registry, job.inputs)
            except PipelineError as error:
                return error

        registry.resolve(self.options.place.repository, "latest")  # one that does not answer is one error, not one each
        return parallel_map(look, jobs, _AT_ONCE)

    def _released(self, registry: Registry, inputs: str) -> ImageIndex | None:
        """The finished result of these inputs: with its annotation, its attachments, and the signature of our key."""
        place = self.options.place.tagged(tags.inputs_tag(inputs))
        if registry.resolve(place.repository, place.tag) is None:
            return None
        try:
            found = read_image(registry, place.repository, place.tag)
        except (NotFound, InvalidResponse) as error:
            log.warn(f"{place} is not what a release puts there, and does not count: {error.message}")
            return None
        if found.top.annotations().get(INPUTS) != inputs or len(found.images) != 1:
            return None
        kinds = {one.artifact_type for one in registry.referrers(place.repository, found.images[0].digest)}
        if not kinds >= attachments.needed(found.images[0]):
            return None
        signer = self.options.signer
        signed = signer is None or cosign.is_signed_by(registry, place.at(found.digest), signer)
        return found if signed else None

    # Running

    def run(self, names: Sequence[str], *, dry_run: bool = False) -> None:
        """Release the named cells (all where none is named). Each is independent, and may be run again."""
        if names:
            known = {job.cell.name for job in self.jobs}
            unknown = [name for name in names if name not in known]
            if unknown:
                raise UsageError(f"there is no cell {unknown[0]}", hint="`pipeline release cells` lists them")
            self.jobs = [job for job in self.jobs if job.cell.name in names]
        with Registry(self.options.place.registry) as registry:
            wanted = []
            for job, there in zip(self.jobs, self._look(registry, self.jobs), strict=True):
                with self._guarded(job):
                    if job.error is not None:
                        raise job.error
                    if isinstance(there, PipelineError):
                        raise there
                    if there is not None and not self._again(job):
                        self.rows[job.cell.name] = self._skip(registry, job, there, dry_run=dry_run)
                    elif dry_run:
                        self.rows[job.cell.name] = Row(job.cell.name, "would push", f"{self.options.place.name}")
                    else:
                        wanted.append(job)
            if wanted:
                self._build(registry, wanted)

    def _again(self, job: Job) -> bool:
        """Whether to tune again although the registry has the result."""
        return self.options.again and not job.cell.caches

    def _build(self, registry: Registry, jobs: Sequence[Job]) -> None:
        try:
            registry.check_writable(self.options.place.repository)  # before anything is tuned or built
        except PipelineError as error:
            log.fail(error)
            self.rows |= {job.cell.name: _failed(job.cell, error) for job in jobs}
            return
        with engine() as session, exports(cache_home()) as layout:
            publisher = Publisher(
                registry, self.options.place, cache_home(), layout, self.options.signer, self.options.compression
            )
            for job in jobs:
                log.note(f"{job.cell.name} ({len(self.rows) + 1} of {len(self.jobs)})")
                with self._guarded(job), publisher.exclusive(job.inputs):
                    there = self._released(registry, job.inputs)
                    if there is not None and not self._again(job):  # by another run, since all were looked up
                        self.rows[job.cell.name] = self._skip(registry, job, there, dry_run=False)
                    else:
                        self.rows[job.cell.name] = self._one(job, session, publisher)

    @contextlib.contextmanager
    def _guarded(self, *jobs: Job) -> Iterator[None]:
        """Work on one cell, or on those of one image; a failure becomes their row, and the others go on."""
        began = time.monotonic()
        try:
            yield
        except PipelineError as error:
            log.fail(error)
            self.rows |= {job.cell.name: _failed(job.cell, error) for job in jobs}
        except OSError as error:  # a full disk, a folder that is not ours
            why = f"{error.filename or 'a file'}: {error.strerror}"
            log.warn(f"{jobs[0].cell.name}: {why}")
            self.rows |= {one.cell.name: Row(one.cell.name, "failed", why=why, code=int(Exit.USAGE)) for one in jobs}
        for name in [job.cell.name for job in jobs if job.cell.name in self.rows]:
            self.rows[name] = replace(self.rows[name], seconds=round(time.monotonic() - began, 3))

    def _one(self, job: Job, session: Session, publisher: Publisher) -> Row:
        assert job.request is not None
        cell, options = job.cell, self.options
        # A matrix names places that may be filled later; what is there is read before the work.
        absent = [place for place in cell.verdicts if not place.exists()]
        given = verdicts.read_files([place for place in (*cell.verdicts, *options.verdicts) if place not in absent])
        image = build(session, job.request, cell)
        proven = verdicts.sufficient(image.verdict, given, absent)
        notes = {**image.annotations(), GPU: cell.gpu or image.gpu, INPUTS: job.inputs}
        notes |= {**revision_annotations(root()), **options.annotations}
        tag = "" if cell.platform else tags.expand(options.template_of(cell), _names(cell, [notes]))
        done = publisher.publish(image, proven, job.inputs, notes, tag)
        name = str(options.place.tagged(tag) if tag else options.place.at(done.digest))
        return Row(cell.name, "pushed" if done.new else "released", name, done.digest)

    def _skip(self, registry: Registry, job: Job, there: ImageIndex, *, dry_run: bool) -> Row:
        """The row of a released cell; its tag is given where an interrupted run did not come so far."""
        cell, place = job.cell, self.options.place
        if cell.platform:
            return Row(cell.name, "released", str(place.at(there.digest)), there.digest)
        name = place.tagged(tags.expand(self.options.template_of(cell), _names(cell, [there.images[0].annotations])))
        done = there if dry_run else self._give(registry, name, there)
        return Row(cell.name, "released", str(name), done.digest)

    def _give(self, registry: Registry, name: Reference, index: ImageIndex) -> ImageIndex:
        """Give a tag that is never moved; return the image that has it, which another host may have released."""
        there, new = give_tag(registry, name, index, self.options.signer)
        self.tags += [name.tag] if new else []
        return there

    # Finishing

    def finish(self, groups_of: Sequence[str] | None = None) -> None:
        """Make indexes of the platforms, give tags and move the floating ones; of all groups of cells, or of some.

        A cell without result is `failed`, and nothing of its group is tagged.
        """
        chosen = [job for job in self.jobs if groups_of is None or job.cell.group in groups_of]
        with Registry(self.options.place.registry) as registry:
            groups: dict[str, list[tuple[Job, ImageIndex | PipelineError | None]]] = {}
            for job, there in zip(chosen, self._look(registry, chosen), strict=True):
                groups.setdefault(job.cell.group, []).append((job, there))
            for name, members in groups.items():
                found = [there for _, there in members if isinstance(there, ImageIndex)]
                for job, there in members:
                    error = job.error or (there if isinstance(there, PipelineError) else None)
                    if there is None and error is None:
                        why = "it has no result in the registry"
                        error = PublishError(why, hint="`pipeline release run … --cell NAME` releases one")
                    if error is not None:
                        self.rows[job.cell.name] = _failed(job.cell, error)
                    elif len(found) < len(members):
                        digest = there.digest if isinstance(there, ImageIndex) else ""
                        why = f"{name} is not tagged: another platform is missing"
                        self.rows[job.cell.name] = Row(job.cell.name, "released", "", digest, why)
                if len(found) == len(members):
                    self._finish_group(registry, [job for job, _ in members], found)

    def _finish_group(self, registry: Registry, jobs: Sequence[Job], found: Sequence[ImageIndex]) -> None:
        cell, place = jobs[0].cell, self.options.place
        with self._guarded(*jobs):
            names = _names(cell, [index.images[0].annotations for index in found])
            name = place.tagged(tags.expand(self.options.template_of(cell), names))
            floating = [tags.expand(template, names) for template in self.options.floating]
            index = found[0] if not cell.platform else self._combined(registry, jobs, found)
            index = self._give(registry, name, index)
            self.tags += [tag for tag in floating if move_tag(registry, place.tagged(tag), index)]
            for job in jobs:
                row = self.rows.get(job.cell.name)
                status: Status = "pushed" if row is not None and row.status == "pushed" else "released"
                self.rows[job.cell.name] = Row(job.cell.name, status, str(name), index.digest)

    def _combined(self, registry: Registry, jobs: Sequence[Job], found: Sequence[ImageIndex]) -> ImageIndex:
        """One index of the images of all platforms with their attestations, pushed and signed. No blob travels."""
        entries = [entry.to_json() for index in found for entry in index.top.entries("manifests")]
        notes = {INPUTS: sha256_json([job.inputs for job in jobs]), **self.options.annotations}
        value = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries, "annotations": notes}
        made = Manifest.of(canonical_json(value), INDEX)
        place = self.options.place
        if registry.resolve(place.repository, made.digest) is None:
            with log.step(f"push the index of {', '.join(job.cell.platform for job in jobs)}"):
                registry.put_manifest(place.repository, made)
        if self.options.signer is not None:
            cosign.sign(registry, place.at(made.digest), self.options.signer)
        return ImageIndex(made, tuple(image for index in found for image in index.images))


def _device(job: Job) -> str:
    """What a host must have; caches that are baked say by themselves that they are a GPU's."""
    gpu = job.request is not None and job.request.device == "cuda"
    return job.cell.device.replace("a CPU", "a GPU") if gpu else job.cell.device


def _failed(cell: Cell, error: PipelineError) -> Row:
    return Row(cell.name, "failed", why=error.message, hint=error.hint, code=int(error.exit_code))


def _names(cell: Cell, images: Sequence[Mapping[str, str]]) -> tags.Names:
    """The fields of an image's tag, from the cell and the annotations of its platforms' images."""

    def listed(*names: str) -> Iterator[str]:
        """The parts of the first of these annotations that each image has."""
        for notes in images:
            yield from next((notes[name] for name in names if notes.get(name)), "").split(",")

    # A server's caches may hold none of FlashInfer's: its warm-up is named instead.
    return tags.Names(
        cell.short_model,
        cell.tp,
        images[0].get(f"{PREFIX}.flashinfer", ""),
        cell.gpu or "-".join(dict.fromkeys(listed(GPU))),
        _one_of(key.rpartition("/")[2] for key in listed(KEY, WARM_UP)),
        _one_of(listed(f"{PREFIX}.manifest", WARM_UP)),
        cell.server,
    )


def _one_of(values: Iterable[str]) -> str:
    """The value, or one digest over several."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else sha256_json(found)


def clashes(options: Options, cells: Sequence[Cell]) -> Iterator[str]:
    """Images that would get the same tag, and tags that are none, as far as that is known before they are built."""
    seen: dict[str, str] = {}
    for group, cell in {cell.group: cell for cell in cells}.items():
        for template in (options.template_of(cell), *options.floating):
            try:
                used = set(tags.fields_of(template))
                if used & {"key", "cache", "flashinfer"} or ("gpu" in used and not cell.gpu):
                    continue  # known when the tag is given, which is never moved then
                tag = tags.expand(template, tags.Names(cell.short_model, cell.tp, "", cell.gpu, "", "", cell.server))
            except UsageError as error:
                yield error.message
                continue
            if seen.setdefault(tag, group) != group:
                yield f"{seen[tag]} and {group} would have the same tag {tag}: a field that tells them apart is missing"
