"""Cells: each is one image to release. A matrix is crossed into them, or models are named one by one."""

from __future__ import annotations

import difflib
import itertools
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.contract.errors import UsageError
from pipeline.image.naming import plain
from pipeline.planning.model_source import usual_tp

from .faults import TagsClash
from .matrixfile import CellTable, EngineTable, ExcludeTable, GpuTable, MatrixFile, refused

_MOST = 1000  # cells of a table that is crossed: more are a mistake
_PATH_FIELDS = ("model", "tp", "gpu", "engine")
# What a cell hands on to `pipeline build` as it stands; lists become its comma-separated words.
_HANDED_ON = (
    "ep", "pp", "dp", "device", "arch", "max_tokens", "buckets", "round_up", "ops", "skip_ops", "backends",
    "base_image", "accept_base_versions", "strategy", "judge",
)  # fmt: skip
_OF_THE_ENGINE = ("base_image", "accept_base_versions", "engine", "engine_args", "engine_env")


class ModelNotInMatrix(UsageError):
    """A model was named that no cell of the matrix has."""


@dataclass(frozen=True)
class Cell:
    """One image: `model`, the names of its GPU types and serving engine (empty: not named), and the settings that
    differ from the command line's, under its arguments' names. `devices`: the GPUs that its caches may be tuned on.
    """

    model: str
    tp: int
    gpus: tuple[str, ...] = ()
    engine: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    caches: tuple[Path, ...] = ()
    verdicts: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        """The GPU types as a tag shows them."""
        return "-".join(self.gpus)

    @property
    def title(self) -> str:
        """How the cell is called in the summary."""
        more = {"ep": "ep", "pp": "pp", "dp": "dp", "max_tokens": "max ", "buckets": "buckets "}
        told = [f"{word}{self.settings[name]}" for name, word in more.items() if name in self.settings]
        words = [self.model, f"tp{self.tp}", "+".join(self.gpus), self.engine, *told]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class _One:
    """One combination of the crossed values; empty text is a value that was not given."""

    model: str
    tp: int
    gpu: str
    engine: str

    def meets(self, rule: ExcludeTable) -> bool:
        """Whether a rule of `exclude` names this one."""
        asked = ((rule.model, self.model), (rule.tp, self.tp), (rule.gpu, self.gpu), (rule.engine, self.engine))
        return all(values is None or value in values for values, value in asked)


def single(model: str, tp: str, caches: Sequence[Path] | None, verdicts: Sequence[Path], engine: str = "") -> Cell:
    """The cell of a model that was named on the command line, `tp` and `engine` as they were typed."""
    ranks = int(tp) if tp.strip().isdecimal() else usual_tp(model)
    return Cell(model, ranks, engine=engine.strip(), caches=tuple(caches or ()), verdicts=tuple(verdicts))


def cross(matrix: MatrixFile, path: Path, *, models: Sequence[str] = (), verdicts: Sequence[Path] = ()) -> list[Cell]:
    """Every cell of the matrix, of `models` alone where some are named.

    Raise `MatrixInvalid` with all that does not fit together, or `ModelNotInMatrix`.
    """
    problems: list[str] = []
    cells: list[Cell] = []
    idle = set(range(len(matrix.exclude)))
    for at, table in enumerate(matrix.cells):
        problems += _strangers(matrix, table, f"cells[{at}]")
        if problems:
            continue
        for one in _combinations(table):
            hit = {number for number, rule in enumerate(matrix.exclude) if one.meets(rule)}
            idle -= hit
            if not hit:
                cells += _cell(matrix, table, one, path.resolve().parent, problems)
    if not problems:
        problems += [f"exclude[{number}] leaves out no cell" for number in sorted(idle)]
        problems += [f"{title}: there are two such cells" for title in _twice(cells)]
    if problems:
        raise refused(path, problems)
    return _of(cells, models, verdicts)


def _of(cells: list[Cell], models: Sequence[str], verdicts: Sequence[Path]) -> list[Cell]:
    known = {cell.model.casefold(): cell.model for cell in cells}
    for model in models:
        if model.casefold() not in known:
            near = difflib.get_close_matches(model.casefold(), known, n=1)
            hint = f"did you mean {known[near[0]]}?" if near else f"it has {', '.join(sorted(known.values()))}"
            raise ModelNotInMatrix(f"the matrix has no model {model!r}", hint=hint)
    wanted = {model.casefold() for model in models} or set(known)
    kept = [cell for cell in cells if cell.model.casefold() in wanted]
    return [replace(cell, verdicts=(*cell.verdicts, *verdicts)) for cell in kept]


def _combinations(table: CellTable) -> Iterator[_One]:
    for model, gpu, engine in itertools.product(table.model, table.gpu or [""], table.engine or [""]):
        for tp in table.tp or [usual_tp(model)]:
            yield _One(model, tp, gpu, engine)


def _strangers(matrix: MatrixFile, table: CellTable, where: str) -> Iterator[str]:
    """Names in a cell that no table defines, and settings that say one thing twice."""
    gpus = [name for one in table.gpu or () for name in one.split("+")]
    for kind, names, tables in (("gpu", gpus, matrix.gpus), ("engine", table.engine or [], matrix.engines)):
        known: Mapping[str, GpuTable | EngineTable] = tables
        for name in dict.fromkeys(names):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                said = f"; did you mean {near[0]}?" if near else ""
                yield f"{where}.{kind}: there is no table [{kind}s.{name}]{said}"
    if table.gpu is not None and (table.device is not None or table.arch is not None):
        yield f"{where}: gpu decides device and arch; leave those out"
    lists = (table.model, table.tp, table.gpu, table.engine)
    if (number := math.prod(len(one) for one in lists if one is not None)) > _MOST:
        yield f"{where}: crossed they are {number} cells, and {_MOST} are the most"
    if table.engine is not None and table.base_image is not None:
        yield f"{where}: engine decides base_image; leave one of them out"


def _cell(matrix: MatrixFile, table: CellTable, one: _One, home: Path, problems: list[str]) -> Iterator[Cell]:
    gpus = tuple(one.gpu.split("+")) if one.gpu else ()
    kinds = [matrix.gpus[name] for name in gpus]
    settings: dict[str, Any] = {"tp": str(one.tp)}
    for name in _HANDED_ON:
        value = getattr(table, name)
        if value is not None:
            listed = ",".join(str(word) for word in value) if isinstance(value, list) else value
            settings[name] = listed if isinstance(listed, (bool, str)) else str(listed)
    if table.bake_jit is not None:
        settings["no_bake_jit"] = not table.bake_jit
    if kinds:
        settings |= {"device": "cuda", "arch": kinds[0].arch}
    start: tuple[str | None, str, str] = (None, "", "")
    if one.engine:
        engine = matrix.engines[one.engine]
        settings |= {"base_image": engine.base_image, "accept_base_versions": engine.accept_base_versions}
        start = engine.start, engine.args or "", engine.env or ""
    if len(kinds) > 1 and not table.cache and any(kind.cache is None for kind in kinds):
        problems.append(f"{one.gpu}: several GPU types are gathered from caches, and one of them has no cache")
        return

    def paths(values: Sequence[str] | None, gpu: str) -> list[Path]:
        return [place for value in values or () if (place := _path(value, one, gpu, home, problems)) is not None]

    caches = paths(table.cache, one.gpu)
    if not caches:
        caches = [place for gpu, kind in zip(gpus, kinds, strict=True) for place in paths(kind.cache, gpu)]
    if start[0] is not None and not caches:
        settings |= dict(zip(("engine", "engine_args", "engine_env"), start, strict=True))
    verdicts = [place for gpu, kind in zip(gpus, kinds, strict=True) for place in paths(kind.verdict, gpu)]
    yield Cell(
        one.model, one.tp, gpus, one.engine, settings,
        caches=tuple(dict.fromkeys(caches)),
        verdicts=tuple(dict.fromkeys([*paths(table.verdict, one.gpu), *verdicts])),
        devices=tuple(kind.name for kind in kinds if kind.name is not None),
    )  # fmt: skip


def _path(text: str, one: _One, gpu: str, home: Path, problems: list[str]) -> Path | None:
    """A path of the matrix, from the matrix's own folder, with the cell's fields in it."""
    fields = {"model": plain(one.model.rpartition("/")[2]), "tp": str(one.tp), "gpu": gpu, "engine": one.engine}
    try:
        used = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
        if any(name not in fields or spec or conversion for name, spec, conversion in used):
            raise ValueError(text)
        return home / Path(text.format_map(fields)).expanduser()
    except (ValueError, RuntimeError):
        problems.append(
            f"{text!r} is no path; its fields can be {', '.join('{' + name + '}' for name in _PATH_FIELDS)}"
        )
        return None


def _twice(cells: Sequence[Cell]) -> Iterator[str]:
    seen: list[Cell] = []
    for cell in cells:
        if cell in seen:
            yield cell.title
        seen.append(cell)


def refuse_same_names(cells: Sequence[Cell], template_of: Callable[[Cell], str]) -> None:
    """Raise `TagsClash` where two cells differ in what their tags do not show: the key may be the same for both."""
    seen: dict[object, Cell] = {}
    for cell in cells:
        template = template_of(cell)
        shown = {name: getattr(cell, name) for name in ("model", "tp", "gpu", "engine") if f"{{{name}}}" in template}
        plan: dict[str, Any] = {n: value for n, value in cell.settings.items() if n not in _OF_THE_ENGINE}
        plan["caches"] = cell.caches
        if "{key}" not in template and "{cache}" not in template:
            plan = {}
        same = (template, tuple(shown.items()), tuple(sorted(plan.items())))
        if same in seen:
            raise TagsClash(
                f"{seen[same].title} and {cell.title} would have the same tag",
                hint="fields that tell them apart: {model}, {tp}, {gpu}, {engine}, {key}",
            )
        seen[same] = cell
