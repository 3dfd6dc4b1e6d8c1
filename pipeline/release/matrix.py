"""release.toml: read strictly, with every error at once, and expanded into cells. Each cell is one image to release.

    registry = "registry.example/team/tuned"
    tag = "{model}-tp{tp}-{gpu}-fi{flashinfer}-{key}"
    floating = ["{model}-latest"]

    [gpus.h200]
    name = "NVIDIA H200"
    arch = "90a"
    cache = "caches/{model}-tp{tp}-h200"
    verdict = "verdicts"

    [servers.vllm]
    base_image = "vllm/vllm-openai:v0.12.0@sha256:…"

    [[cells]]
    model = ["llama-3.1-8b", "qwen3-8b"]
    tp = [1, 2]
    gpu = ["h200", "h100+h200"]
    server = "vllm"

Lists of `model`, `tp`, `gpu`, `server` and `platform` give a cell for each combination. `h100+h200` gathers the caches
of both in one image.
"""

from __future__ import annotations

import itertools
import math
import string
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pipeline.contract.errors import UsageError
from pipeline.contract.text import closest
from pipeline.flashinfer.gpus import find_arch
from pipeline.image.names import PREFIX, plain
from pipeline.planning.model_source import usual_tp

_MAX_CELLS = 1000  # combinations of one table: more are a mistake
_AXES = ("model", "tp", "gpu", "server", "platform")
_PATH_FIELDS = ("model", "tp", "gpu", "server")
# Of a cell's table, what a build does not take under the same name.
_NOT_HANDED_ON = frozenset({*_AXES, "name", "bake_jit", "cache", "verdict"})


@dataclass(frozen=True)
class Cell:
    """One image to release. `name` is stable: the same table of the matrix gives it again.

    `gpus` are names of GPU tables, `devices` the driver's names of them (where a table says it), `server` and
    `platform` are empty where not named. `settings` are arguments of a build by name, `caches` cache roots to bake
    instead of tuning, `verdicts` files and folders.
    """

    name: str
    model: str
    tp: int
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    server: str = ""
    platform: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    caches: tuple[Path, ...] = ()
    verdicts: tuple[Path, ...] = ()

    @property
    def gpu(self) -> str:
        """The GPU types as a tag shows them."""
        return "-".join(self.gpus)

    @property
    def short_model(self) -> str:
        """The model's name without owner or folder."""
        return _short(self.model)

    @property
    def group(self) -> str:
        """The name without the platform: cells of one group become one index."""
        return self.name.removesuffix(f"-{self.platform}") if self.platform else self.name

    @property
    def device(self) -> str:
        """What a host must have to tune and to replay it, in words."""
        kind = " + ".join(self.devices or self.gpus)
        if not kind:
            arch = str(self.settings.get("arch", ""))
            kind = f"a GPU of sm_{arch}" if self.settings.get("device") == "cuda" or arch[:1].isdigit() else "a CPU"
        return f"{kind}, {self.platform}" if self.platform else kind


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _not_reserved(name: str) -> str:
    if name.startswith(PREFIX):
        raise PydanticCustomError("reserved", "it is set by the release itself")
    return name


_SHORT = r"[a-z0-9]+([.-][a-z0-9]+)*"
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Arch = Annotated[Name, AfterValidator(lambda text: find_arch(text) or text)]  # b200 is 100a
Short = Annotated[str, Field(pattern=rf"^{_SHORT}$", max_length=40)]
Count = Annotated[int, Field(ge=1, le=4096)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
Names = Annotated[list[Name], BeforeValidator(_listed), Field(min_length=1)]
Counts = Annotated[list[Count], BeforeValidator(_listed), Field(min_length=1)]
Buckets = Annotated[list[int | Name], BeforeValidator(_listed), Field(min_length=1)]  # as `--buckets` takes them
Gpus = Annotated[
    list[Annotated[str, Field(pattern=rf"^{_SHORT}(\+{_SHORT})*$")]], BeforeValidator(_listed), Field(min_length=1)
]
Platforms = Annotated[list[Literal["amd64", "arm64"]], BeforeValidator(_listed), Field(min_length=1)]


Annotation = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"), AfterValidator(_not_reserved)]
Printed = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GpuTable(_Strict):
    """A type of GPU: its architecture as FlashInfer names it or its name, and where its caches and verdicts come from.

    `name` is what the driver calls it; caches that were tuned on another are then refused. Without `cache` the cell is
    tuned by the host that runs it.
    """

    arch: Arch
    name: Name | None = None
    cache: Names | None = None
    verdict: Names | None = None


class ServerTable(_Strict):
    """A server: the image that the cell is built on.

    With `start` the server warms up in its own start, with `args` after its serve command, in which `{tp}` is the
    cell's, and `env` set for it; the cell's cache is what `warm-up --in-place` wrote. Without it FlashInfer is tuned.
    """

    base_image: Name
    accept_base_versions: bool = False
    start: Literal["vllm", "sglang"] | None = None
    args: Name | None = None
    env: Name | None = None


class CellTable(_Strict):
    """A cell for each combination of the lists. `name` tells two tables apart; the rest are options of a build."""

    name: Short | None = None
    model: Names
    tp: Counts | None = None
    gpu: Gpus | None = None
    server: Names | None = None
    platform: Platforms | None = None
    ep: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    device: Literal["cpu", "cuda"] | None = None
    arch: Arch | None = None
    max_tokens: Tokens | None = None
    buckets: Buckets | None = None
    round_up: bool | None = None
    ops: Names | None = None
    skip_ops: Names | None = None
    backends: Names | None = None
    base_image: Name | None = None
    accept_base_versions: bool | None = None
    bake_jit: bool | None = None
    strategy: Literal["synchronized", "leader", "independent", "sharded"] | None = None
    compare: Literal["on", "off"] | None = None
    cache: Names | None = None
    verdict: Names | None = None

    @model_validator(mode="after")
    def _check(self) -> CellTable:
        wrong = ""
        if self.gpu is not None and (self.device is not None or self.arch is not None):
            wrong = "gpu decides device and arch; leave those out"
        elif self.gpu is None and self.device == "cuda" and self.arch is None:
            wrong = "which GPU? Name one in gpu, or its architecture in arch"
        elif self.server is not None and self.base_image is not None:
            wrong = "server decides base_image; leave one of them out"
        elif (number := math.prod(len(getattr(self, axis) or [""]) for axis in _AXES)) > _MAX_CELLS:
            wrong = f"the matrix expands to {number} cells (limit {_MAX_CELLS})"
        if wrong:
            raise PydanticCustomError("cell", "{said}", {"said": wrong})
        return self


class Matrix(_Strict):
    """The whole file."""

    registry: Name | None = None
    tag: Name | None = None
    floating: Names | None = None
    gpus: dict[Short, GpuTable] = Field(default_factory=dict)
    servers: dict[Short, ServerTable] = Field(default_factory=dict)
    annotations: dict[Annotation, Printed] = Field(default_factory=dict)
    cells: Annotated[list[CellTable], Field(min_length=1)]


_TABLES: dict[str, type[BaseModel]] = {
    "gpus": GpuTable, "servers": ServerTable, "cells": CellTable,
}  # fmt: skip


def read_matrix(path: Path) -> tuple[Matrix, tuple[Cell, ...]]:
    """Read a matrix and expand it; raise `UsageError` with every error."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe has no end
            raise UsageError(f"{path} is not a file", hint="--matrix takes a release.toml")
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="--matrix takes a release.toml") from None
    except (ValueError, RecursionError) as error:  # also no UTF-8, a number that Python does not read, too deep
        raise UsageError(f"{path} is not TOML: {error}", hint="https://toml.io has the grammar") from None
    try:
        matrix = Matrix.model_validate(value)
    except ValidationError as error:
        raise _invalid(path, map(_described, error.errors(include_url=False))) from None
    problems: list[str] = []
    cells = tuple(_expanded(matrix, path.resolve().parent, problems))
    if problems:
        raise _invalid(path, problems)
    return matrix, cells


def single(model: str, tp: str, *, caches: Sequence[Path] = (), settings: Mapping[str, Any] | None = None) -> Cell:
    """The cell of a model that was named on the command line, `tp` as it was typed."""
    ranks = int(tp) if tp.strip().isdecimal() else usual_tp(model)
    return Cell(f"{_word(model)}-tp{ranks}", model, ranks, settings=settings or {}, caches=tuple(caches))


def _invalid(path: Path, problems: Iterable[str]) -> UsageError:
    """The error with all problems; one alone is the message itself."""
    found = list(dict.fromkeys(problems))
    hint = "docs/reference/release.md describes release.toml"
    if len(found) == 1:
        return UsageError(f"{path}: {found[0]}", hint=hint)
    return UsageError(f"{path}: {len(found)} errors", details=found, hint=hint)


def _described(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    place = [part for part in error["loc"] if not str(part).endswith("[key]")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"
    table = _TABLES.get(str(place[0]), Matrix) if len(place) > 1 else Matrix
    return f"{where}: there is no such key{_did_you_mean(str(place[-1]), table.model_fields)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = closest(name, known)
    return f"; did you mean {near}?" if near else ""


# Expansion


@dataclass(frozen=True)
class _One:
    """One combination of the lists' values; empty text is a value that was not given."""

    model: str
    tp: int
    gpu: str
    server: str
    platform: str


def _expanded(matrix: Matrix, home: Path, problems: list[str]) -> Iterator[Cell]:
    names: Counter[str] = Counter()
    for at, table in enumerate(matrix.cells):
        unknown = list(_unknown(matrix, table, f"cells[{at}]"))
        problems += unknown
        for one in () if unknown else _combinations(table):
            for cell in _cell(matrix, table, one, home, problems):
                names[cell.name] += 1
                yield cell
    twice = [name for name, number in names.items() if number > 1]
    problems += [f"duplicate cell {name}: give the tables that make it a `name` each" for name in twice]


def _combinations(table: CellTable) -> Iterator[_One]:
    platforms: Sequence[str] = table.platform or [""]
    lists = (table.model, table.gpu or [""], table.server or [""], platforms)
    for model, gpu, server, platform in itertools.product(*lists):
        for tp in table.tp or [usual_tp(model)]:
            yield _One(model, tp, gpu, server, platform)


def _unknown(matrix: Matrix, table: CellTable, where: str) -> Iterator[str]:
    """References of a cell to tables that are not there."""
    gpus = [name for one in table.gpu or () for name in one.split("+")]
    for kind, names, tables in (("gpu", gpus, matrix.gpus), ("server", table.server or [], matrix.servers)):
        known: Collection[str] = tables
        for name in dict.fromkeys(names):
            if name not in known:
                yield f"{where}.{kind}: there is no table [{kind}s.{name}]{_did_you_mean(name, known)}"


def _cell(matrix: Matrix, table: CellTable, one: _One, home: Path, problems: list[str]) -> Iterator[Cell]:
    gpus = tuple(one.gpu.split("+")) if one.gpu else ()
    kinds = [matrix.gpus[name] for name in gpus]
    settings: dict[str, Any] = {"tp": str(one.tp)}
    for name, value in table.model_dump(exclude_none=True, exclude=set(_NOT_HANDED_ON)).items():
        one_text = ",".join(map(str, value)) if isinstance(value, list) else value
        settings[name] = one_text if isinstance(one_text, bool) else str(one_text)
    if table.bake_jit is not None:
        settings["no_bake_jit"] = not table.bake_jit
    if kinds:
        settings |= {"device": "cuda", "arch": kinds[0].arch}
    if len(kinds) > 1 and not table.cache and any(kind.cache is None for kind in kinds):
        problems.append(f"{one.gpu}: several GPU types are gathered from caches, and one of them has no cache")
        return

    def paths(values: Sequence[str] | None, gpu: str) -> list[Path]:
        return [place for value in values or () if (place := _path(value, one, gpu, home, problems)) is not None]

    caches = paths(table.cache, one.gpu)
    if not caches:
        caches = [place for gpu, kind in zip(gpus, kinds, strict=True) for place in paths(kind.cache, gpu)]
    if one.server:
        server = matrix.servers[one.server]
        settings |= {"base_image": server.base_image, "accept_base_versions": server.accept_base_versions}
        if server.start is not None:
            del settings["tp"]  # its arguments say it
            arguments = (server.args or "").replace("{tp}", str(one.tp))
            settings |= {"server": server.start, "server_args": arguments, "server_env": server.env or ""}
    verdicts = [place for gpu, kind in zip(gpus, kinds, strict=True) for place in paths(kind.verdict, gpu)]
    more = [f"{name}{value}" for name in ("ep", "pp", "dp") if (value := getattr(table, name)) is not None]
    words = [_word(one.model), f"tp{one.tp}", *more, *gpus, one.server, table.name or "", one.platform]
    yield Cell(
        "-".join(word for word in words if word),
        str(home / one.model) if one.model.startswith(".") else one.model,
        one.tp,
        gpus,
        devices=tuple(kind.name for kind in kinds if kind.name is not None),
        server=one.server,
        platform=one.platform,
        settings=settings,
        caches=tuple(dict.fromkeys(caches)),
        verdicts=tuple(dict.fromkeys([*paths(table.verdict, one.gpu), *verdicts])),
    )


def _short(model: str) -> str:
    path = PurePosixPath(model)
    return (path.parent.name or path.stem) if path.name == "config.json" else path.name


def _word(model: str) -> str:
    return plain(_short(model))


def _path(text: str, one: _One, gpu: str, home: Path, problems: list[str]) -> Path | None:
    """A path of the matrix, from the matrix's own folder, with the cell's fields in it."""
    fields = {"model": _word(one.model), "tp": str(one.tp), "gpu": gpu, "server": one.server}
    try:
        used = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
        if any(name not in fields or spec or conversion for name, spec, conversion in used):
            raise ValueError(text)
        return home / Path(text.format_map(fields)).expanduser()
    except (ValueError, RuntimeError):
        names = ", ".join("{" + name + "}" for name in _PATH_FIELDS)
        problems.append(f"{text!r} is not a path; its fields can be {names}")
        return None
