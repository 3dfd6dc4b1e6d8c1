"""The environment that a cache is explained against: FlashInfer's flat record, and what our own record adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.strictjson import Unreadable, parse_object, read_bytes
from pipeline.contract.text import shown

from .judge import Field
from .read import METADATA

if TYPE_CHECKING:
    from pipeline.contract.record import Record

# FlashInfer always records these; a record without them is not FlashInfer's.
_NEEDED = ("flashinfer_version", "gpu")


class EnvironmentInvalid(UsageError):
    """The file given with --env is not an environment record."""


@dataclass(frozen=True)
class Environment:
    """`record` is what FlashInfer compares; `arch` and `cpu` are empty where only that is known.

    `complete` is False where only the host half could be read (no torch here), so that a cache which fits may
    still be refused for a field that was not compared.
    """

    record: Mapping[str, str]
    arch: str = ""
    cpu: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    source: str = ""

    def host_fields(self, arch: str, tuned: Record | None) -> tuple[Field, ...]:
        """What differs beside FlashInfer's record: the architecture, and for `cpu-*` the processor."""
        found = [Field("arch", arch, self.arch, "hard")] if self.arch and arch and arch != self.arch else []
        if tuned is not None and self.cpu:
            for name, value in tuned.host.cpu.items():
                if name in self.cpu and self.cpu[name] != value:
                    found.append(Field(f"cpu.{name}", value, self.cpu[name], "hard"))
        return tuple(found)


def from_record(record: Record, source: str) -> Environment:
    """An environment from our own record."""
    return Environment(dict(record.flashinfer), record.arch, dict(record.host.cpu), source=source)


def parse_environment(data: bytes, source: str) -> Environment:
    """Read FlashInfer's flat record; or a record, manifest or cache file that contains one.

    Raises `EnvironmentInvalid` with what is wrong.
    """
    hint = 'give FlashInfer\'s flat record: {"flashinfer_version": "…", …, "gpu": "…"}'
    try:
        value, found = parse_object(data, source)
        if found:
            raise EnvironmentInvalid(found[0].what, hint=hint)
        if "flashinfer" in value and "arch" in value:
            from pipeline.contract.record import Record  # here and below: most often a flat record is given

            return from_record(Record.from_json(value), source)
        if "record" in value and "plan" in value:
            from pipeline.contract.manifest import Manifest

            return from_record(Manifest.from_json(value).record, source)
    except Unreadable as error:
        raise EnvironmentInvalid(error.message, hint=hint) from error
    except (CacheRefused, UsageError) as error:
        if isinstance(error, EnvironmentInvalid):
            raise
        raise EnvironmentInvalid(f"{source}: {error.message}", hint=hint) from error
    inner = value.get(METADATA, value)
    return Environment(_flat(inner, source, hint), source=source)


def read_environment(path: Path) -> Environment:
    """Read a record from a file. Raises `EnvironmentInvalid`, or `FileMissing` when it cannot be read."""
    try:
        return parse_environment(read_bytes(path, pipe=True), shown(str(path)))
    except Unreadable as error:
        raise EnvironmentInvalid(error.message, hint=error.hint) from error


def _flat(value: Any, source: str, hint: str) -> dict[str, str]:  # noqa: ANN401 - any JSON value
    if not isinstance(value, dict):
        raise EnvironmentInvalid(f"{source} is not a flat record", hint=hint)
    wrong = [name for name, one in value.items() if not isinstance(one, str)]
    if wrong:
        raise EnvironmentInvalid(f"{source}: {shown(wrong[0], 40)} is not text", hint=hint)
    missing = [name for name in _NEEDED if name not in value]
    if missing:
        raise EnvironmentInvalid(f"{source} lacks {' and '.join(missing)}", hint=hint)
    return dict(value)
