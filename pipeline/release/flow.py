"""`pipeline release run`, end to end: look at what is released already, then each other cell from tuning to its tag."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.errors import PipelineError
from pipeline.contract.exits import Exit
from pipeline.contract.manifest import Manifest
from pipeline.home import cache_home
from pipeline.image import base as bases
from pipeline.image.caches import collect
from pipeline.image.flow import finish, give_name
from pipeline.image.guard import connected, translated
from pipeline.image.naming import gpu_of, key_of
from pipeline.image.outcome import Clock, log_file
from pipeline.image.prepare import Prepared, prepare
from pipeline.image.probes import Probes
from pipeline.image.request import Request
from pipeline.image.verify import device_name
from pipeline.registry.client import Registry, parallel_map
from pipeline.versions import load

from .annotate import notes_of, revision_of
from .ask import Ask, inputs_of, names_of
from .attach import Attachment
from .attaching import Proofs
from .cells import Cell
from .faults import CachesOfAnother, TagsClash
from .journal import Journal
from .layout import layout
from .lookup import Shelf, There
from .names import FIELDS, Names, check_names, expand, pattern
from .outcome import Row, Summary
from .publish import Publisher, move
from .scanner import available
from .verdicts import proofs, read_verdicts

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine

_AT_ONCE = 8  # cells that are looked up at the registry at the same time


@dataclass(frozen=True)
class _Job:
    """One cell that could be prepared: what is known of its names, and the journal of its inputs digest."""

    at: int
    cell: Cell
    request: Request
    prepared: Prepared
    names: Names
    journal: Journal


class Release:
    """One run. `rows` fills as cells end, so that a run that is interrupted can still say how far it came.

    A cell comes with its request, or with the error that it fails with.
    """

    def __init__(self, ask: Ask, cells: Sequence[tuple[Cell, Request | PipelineError]]) -> None:
        self.ask = ask
        self.cells = cells
        self.rows: dict[int, Row] = {}
        self._scanner: str | None = None
        self._listed: dict[str, Attachment] = {}
        self._layout = Path()
        self._log = Path()

    def summary(self) -> Summary:
        """What came of every cell; those that were not reached are `interrupted`."""
        rest = (Row(cell.title, "interrupted", why="not reached") for cell, _ in self.cells)
        return Summary(self.ask.place.name, tuple(self.rows.get(at, row) for at, row in enumerate(rest)))

    def run(self) -> None:
        """Release every cell. Raise what is wrong for all of them: no engine, no registry, tags that clash."""
        engine = self._engine()
        self._log = log_file(cache_home(), "release")
        with (
            Registry(self.ask.place.registry) as registry,
            connected(engine) as client,
            layout(cache_home()) as self._layout,
        ):
            shelf = Shelf(registry, self.ask.place.repository, self.ask.signer, self.ask.signed_by)
            shelf.tags()  # a registry that does not answer, or not us, is told before any work
            jobs = list(self._prepare(engine, client))
            self._refuse_clashes(jobs)
            for job, there in zip(jobs, self._look(shelf, jobs), strict=True):
                with self._guarded(job.at, engine):
                    if isinstance(there, PipelineError):
                        raise there
                    if there is not None:
                        self.rows[job.at] = self._skip(registry, job, there)
                    elif self.ask.dry_run:
                        self.rows[job.at] = Row(job.cell.title, "would push", image=self._expected(job))
            for job in self._to_push(registry, [job for job in jobs if job.at not in self.rows]):
                log.note(f"[{job.at + 1}/{len(self.cells)}] {job.cell.title}")
                with self._guarded(job.at, engine):
                    self.rows[job.at] = self._one(registry, job)

    def _to_push(self, registry: Registry, jobs: Sequence[_Job]) -> Sequence[_Job]:
        """Those jobs, unless nothing can be pushed to the repository: told before anything is tuned or built."""
        if not jobs:
            return jobs
        try:
            registry.check_writable(self.ask.place.repository)
        except PipelineError as error:
            log.fail(error)
            self.rows.update({job.at: _failed(job.cell.title, error) for job in jobs})
            return ()
        return jobs

    def _engine(self) -> Engine:
        """An engine with the containerd store: only that keeps annotations and attestations."""
        from pipeline.daemon import NoEngine, find, up

        if self.ask.dry_run and find() is None:
            raise NoEngine("no engine answers, and a dry run starts none", hint="pipeline daemon up --store containerd")
        return up("containerd")

    @contextlib.contextmanager
    def _guarded(self, at: int, engine: Engine) -> Iterator[None]:
        """Work on one cell; its failure becomes its row, and the others go on."""
        began, title = time.monotonic(), self.cells[at][0].title
        try:
            with translated(engine):
                yield
        except PipelineError as error:
            log.fail(error)
            self.rows[at] = _failed(title, error)
        except OSError as error:  # a full disk, a folder that is not ours
            why = f"{error.filename or 'a file'}: {error.strerror}"
            log.warn(f"{title}: {why}")
            self.rows[at] = Row(title, "failed", why=why, code=int(Exit.USAGE))
        if at in self.rows:
            self.rows[at] = replace(self.rows[at], seconds=round(time.monotonic() - began, 3))

    def _prepare(self, engine: Engine, client: DockerClient) -> Iterator[_Job]:
        """Every cell that can be prepared; the others get their rows."""
        home, probes = cache_home(), Probes()
        for at, (cell, request) in enumerate(self.cells):
            with self._guarded(at, engine):
                if isinstance(request, PipelineError):
                    raise request
                if self.ask.dry_run and not _base_is_here(client, request):
                    why = "not compared: its base image is not in the engine yet"
                    self.rows[at] = Row(cell.title, "would push", why=why)
                    continue
                prepared = prepare(request, engine, client, self._log, probes)
                journal = Journal(home, self.ask.place.name, inputs_of(self.ask, cell, request, prepared))
                yield _Job(at, cell, request, prepared, names_of(cell, prepared), journal)

    def _refuse_clashes(self, jobs: Sequence[_Job]) -> None:
        """Refuse templates that give no tag, and moving tags that two cells would fight for, or that look like a
        cell's own immutable tag.
        """
        seen: dict[str, str] = {}
        for job in jobs:
            check_names(self.ask.template_of(job.cell), job.names)
            for template in self.ask.moves:
                check_names(template, job.names)
                tag = expand(template, job.names)
                if tag in seen:
                    raise TagsClash(
                        f"{seen[tag]} and {job.cell.title} would both move {tag}",
                        hint="--move-tag '{model}-tp{tp}-latest'",
                    )
                if pattern(self.ask.template_of(job.cell), job.names).fullmatch(tag):
                    raise TagsClash(f"{tag} would be moved, and it is a release's own tag", hint="choose another name")
                seen[tag] = job.cell.title

    def _look(self, shelf: Shelf, jobs: Sequence[_Job]) -> list[There | PipelineError | None]:
        """What is released already of each job, or why that cannot be told."""

        def look(job: _Job) -> There | PipelineError | None:
            if self.ask.again and not job.cell.caches:
                return None
            try:
                return shelf.find(self.ask.template_of(job.cell), job.names, job.journal)
            except PipelineError as error:
                return error

        return parallel_map(look, jobs, _AT_ONCE)

    def _skip(self, registry: Registry, job: _Job, there: There) -> Row:
        moves = () if self.ask.dry_run else tuple(expand(template, job.names) for template in self.ask.moves)
        moved = move(registry, self.ask.place, there.digest, moves)
        image = str(self.ask.place.tagged(there.tag))
        return Row(
            job.cell.title, "skipped", image, there.digest, moved=moved, why="the same inputs are released already"
        )

    def _expected(self, job: _Job) -> str:
        known = {name: value or "*" for name, value in job.names.fields().items()}
        assert set(known) == set(FIELDS)
        return f"{self.ask.place.name}:{self.ask.template_of(job.cell).format_map(known)}"

    def _one(self, registry: Registry, job: _Job) -> Row:
        """Tune or take, bake, verify, push, attach, sign, tag."""
        _refuse_strangers(job, [one.manifest for one in collect(job.cell.caches)] if job.cell.caches else [])
        done = finish(job.request, job.prepared, Clock(), self._log)
        give_name(done)
        verdicts = proofs(done.verdict, read_verdicts(job.cell.verdicts))
        names = replace(
            job.names,
            gpu=job.cell.gpu or gpu_of(done.manifests),
            key=key_of(done.manifests),
            cache=done.keys[0].manifest_sha256 if len(done.keys) == 1 else done.verdict.manifest_sha256,
        )
        place = self.ask.place.tagged(expand(self.ask.template_of(job.cell), names))
        notes = notes_of(done, job.journal.inputs, revision_of(self.ask.root), self.ask.own)
        scanner = self._scan(job)
        beside = Proofs(self.ask.signer, self.ask.signed_by, scanned=bool(scanner), listed=self._listed)
        publisher = Publisher(registry, place, job.journal, notes, scanner, self._layout, beside)
        published = publisher.publish(done, verdicts)
        moved = move(registry, place, published.digest, tuple(expand(template, names) for template in self.ask.moves))
        why = "" if published.new else "the same image is there already"
        return Row(
            job.cell.title, "pushed" if published.new else "skipped", str(place), published.digest,
            done.built.config_digest, moved, why,
        )  # fmt: skip

    def _scan(self, job: _Job) -> str:
        if self._scanner is None:
            self._scanner = available(job.prepared.client)
        return self._scanner


def _failed(title: str, error: PipelineError) -> Row:
    return Row(title, "failed", why=error.message, hint=error.hint, code=int(error.exit_code))


def _base_is_here(client: DockerClient, request: Request) -> bool:
    versions = load(request.root)
    wanted, default = request.base_image, versions["BASE_IMAGE"]
    return bases.present(client, wanted=wanted, default=default, suite=versions["DEBIAN_SUITE"]) is not None


def _refuse_strangers(job: _Job, manifests: Sequence[Manifest]) -> None:
    """Raise `CachesOfAnother` where imported caches are not what the cell's name says."""
    wrong = []
    wanted = job.prepared.plan
    for manifest in manifests:
        plan, gpus = manifest.plan, manifest.record.host.gpus
        if plan.model != wanted.model or plan.layout != wanted.layout:
            wrong.append(f"{manifest.key} was tuned for {plan.model} with TP {plan.layout.tp}")
        if job.cell.devices and gpus and not set(gpus) <= set(job.cell.devices):
            wrong.append(f"{manifest.key} was tuned on {device_name(manifest)}, not on {' or '.join(job.cell.devices)}")
    if wrong:
        raise CachesOfAnother(
            f"{job.cell.title}: {wrong[0]}", details=wrong, hint="a cell's cache holds that cell's keys and no others"
        )
