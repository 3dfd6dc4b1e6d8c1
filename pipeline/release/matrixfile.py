"""release.toml at the file's boundary: its shape, checked strictly, every error at once, each with its path.

    registry = "registry.example/team/tuned"
    tag = "{model}-tp{tp}-{gpu}-fi{flashinfer}-{key}"
    move = ["{model}-latest"]

    [gpus.h200]
    name = "NVIDIA H200"
    arch = "90a"
    cache = "caches/{model}-tp{tp}-h200"
    verdict = "verdicts"

    [engines.vllm]
    base_image = "vllm/vllm-openai:v0.12.0"

    [[cells]]
    model = ["llama-3.1-8b", "qwen3-8b"]
    tp = [1, 2]
    gpu = ["h200", "h100+h200"]
    engine = "vllm"

    [[exclude]]
    model = "qwen3-8b"
    tp = 2

Lists of `model`, `tp`, `gpu` and `engine` are crossed. `h100+h200` gathers the caches of both into one image.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from pipeline.contract.errors import UsageError
from pipeline.planning.buckets import read_buckets, spell_buckets
from pipeline.planning.problems import Problems

_LARGEST = 1 << 20  # bytes; a matrix has some hundred lines


class MatrixInvalid(UsageError):
    """release.toml cannot be read, or says what no release can mean."""


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _buckets(value: object) -> str:
    """A count, a text as `--buckets` takes it, or a list of these; equal buckets have one spelling.

    Raises `PydanticCustomError` with all that is wrong.
    """
    named = value if isinstance(value, list) else [value]
    problems = Problems()
    if any(type(one) not in (int, str) for one in named):
        problems.add("input should be token counts and ranges", 'such as [1, 2, 4, "8-256:8"]')
    else:
        counts = read_buckets(",".join(map(str, named)), problems, "buckets")
        if counts and not problems.found:
            return spell_buckets(counts)
        if not problems.found:
            problems.add("there is no token count")
    raise PydanticCustomError("buckets", "{said}", {"said": "; ".join(problems.lines())})


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Short = Annotated[str, Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$", max_length=40)]
Count = Annotated[int, Field(ge=1, le=4096)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
Names = Annotated[list[Name], BeforeValidator(_listed), Field(min_length=1)]
Counts = Annotated[list[Count], BeforeValidator(_listed), Field(min_length=1)]
Gathered = Annotated[str, Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*(\+[a-z0-9]+([.-][a-z0-9]+)*)*$")]
Gpus = Annotated[list[Gathered], BeforeValidator(_listed), Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GpuTable(_Strict):
    """A type of GPU: its architecture as FlashInfer names it, and where its caches and verdicts come from.

    `name` is what the driver calls it; caches that were tuned on another are then refused. Without `cache` the cell
    is tuned by the engine that releases it.
    """

    arch: Name
    name: Name | None = None
    cache: Names | None = None
    verdict: Names | None = None


class EngineTable(_Strict):
    """A serving engine: the image that the cell is built on.

    With `start` the engine tunes in its own start where the cell has no cache, with `args` after its serve command and
    `env` set for it.
    """

    base_image: Name
    accept_base_versions: bool = False
    start: Literal["vllm", "sglang"] | None = None
    args: Name | None = None
    env: Name | None = None


class CellTable(_Strict):
    """Cells, crossed over the lists. The rest is what `pipeline build` takes under the same name."""

    model: Names
    tp: Counts | None = None
    gpu: Gpus | None = None
    engine: Names | None = None
    ep: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    device: Literal["cpu", "cuda"] | None = None
    arch: Name | None = None
    max_tokens: Tokens | None = None
    buckets: Annotated[str, BeforeValidator(_buckets)] | None = None
    round_up: bool | None = None
    ops: Names | None = None
    skip_ops: Names | None = None
    backends: Names | None = None
    base_image: Name | None = None
    accept_base_versions: bool | None = None
    bake_jit: bool | None = None
    strategy: Literal["synchronized", "leader", "independent", "sharded"] | None = None
    judge: Literal["on", "off"] | None = None
    cache: Names | None = None
    verdict: Names | None = None


class ExcludeTable(_Strict):
    """Crossed cells that are left out: those that agree with every value given here."""

    model: Names | None = None
    tp: Counts | None = None
    gpu: Gpus | None = None
    engine: Names | None = None


class MatrixFile(_Strict):
    """The whole file."""

    registry: Name | None = None
    tag: Name | None = None
    move: Names | None = None
    gpus: dict[Short, GpuTable] = Field(default_factory=dict)
    engines: dict[Short, EngineTable] = Field(default_factory=dict)
    annotations: dict[Name, str] = Field(default_factory=dict)
    cells: Annotated[list[CellTable], Field(min_length=1)]
    exclude: list[ExcludeTable] = Field(default_factory=list)


_TABLES: dict[str, type[BaseModel]] = {
    "gpus": GpuTable, "engines": EngineTable, "cells": CellTable, "exclude": ExcludeTable,
}  # fmt: skip


def read_matrix(path: Path) -> MatrixFile:
    """Read and check a matrix; raise `MatrixInvalid` with every error."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe has no end
            raise MatrixInvalid(f"{path} is no file", hint="--matrix takes a release.toml")
        if path.stat().st_size > _LARGEST:
            raise MatrixInvalid(f"{path} is larger than a matrix can be", hint="--matrix takes a release.toml")
        value = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise MatrixInvalid(f"{path}: {error.strerror}", hint="--matrix takes a release.toml") from None
    except UnicodeDecodeError:
        raise MatrixInvalid(f"{path} is not UTF-8 text", hint="--matrix takes a release.toml") from None
    except RecursionError:
        raise MatrixInvalid(f"{path} is nested too deeply", hint="--matrix takes a release.toml") from None
    except ValueError as error:  # tomllib's own, or a number of more digits than Python reads
        raise MatrixInvalid(f"{path}: {error}", hint="https://toml.io has the grammar") from None
    try:
        return MatrixFile.model_validate(value)
    except ValidationError as error:
        problems = [_said(one) for one in error.errors(include_url=False)]
    raise refused(path, problems)


def refused(path: Path, problems: Iterable[str]) -> MatrixInvalid:
    """The error with all problems; one alone is the message itself."""
    found = list(dict.fromkeys(problems))
    if len(found) == 1:
        return MatrixInvalid(f"{path}: {found[0]}", hint="docs/release.md describes release.toml")
    return MatrixInvalid(f"{path}: {len(found)} errors", details=found, hint="docs/release.md describes release.toml")


def _said(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    place = [part for part in error["loc"] if not str(part).endswith("[key]")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"
    near = difflib.get_close_matches(str(place[-1]), _known(place), n=1)
    return f"{where}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")


def _known(place: list[Any]) -> list[str]:
    table = _TABLES.get(str(place[0]), MatrixFile) if len(place) > 1 else MatrixFile
    return list(table.model_fields)
