"""From JSON to the dataclasses that host and image share: one reader for plans, records, manifests and verdicts.

The annotations are the only rules. Every field that is wrong is named at once, with its path; whatever the value is,
the answer is an object or one error. A dataclass may add:

- `SCHEMA`: the number that its key `schema` must have;
- `DERIVED`: keys that its `to_json` adds, each equal to the property of that name;
- `problems()`: what no annotation says, as `.path: what`; called only where every type is right.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, Union

from .errors import PipelineError
from .strictjson import parse_object
from .text import shown

T = TypeVar("T")
_MOST = 50  # named of all that is wrong
_PLAIN: dict[object, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    type(None): ((type(None),), "null"),
}
# Reads one value; what is wrong goes to the list, without the path to the value, which the caller puts in front.
_Read = Callable[[Any, list[str]], Any]


class _Error(Protocol):
    def __call__(self, message: str, *, hint: str = "", details: tuple[str, ...] = ()) -> PipelineError: ...


def decode(cls: type[T], value: object, name: str, error: _Error, *, hint: str = "") -> T:
    """Make `value`, as JSON was read, a `cls`. `name` is what messages call it. Raises `error`."""
    wrong: list[str] = []
    found: T = _reader(typing.cast("Any", cls))(value, wrong)
    if wrong:
        lines = tuple(f"${line}" for line in wrong[:_MOST])
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise error(f"{name}: {lines[0]}{more}", hint=hint, details=lines if len(lines) > 1 else ())
    return found


def load(cls: type[T], data: bytes, name: str, error: _Error, *, hint: str = "") -> T:
    """Make bytes that anyone may have written a `cls`. Raises `error`."""
    try:
        value, defects = parse_object(data, name)
    except PipelineError as wrong:
        raise error(wrong.message, hint=hint or wrong.hint) from wrong
    if defects:
        raise error(f"{name}: {defects[0].what}", hint=hint)
    return decode(cls, value, name, error, hint=hint)


@cache
def _reader(kind: Any) -> _Read:  # noqa: ANN401 - any annotation
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        made: _Read = lambda value, _: value  # noqa: E731 - as the others
    elif kind in _PLAIN:
        made = _plain(*_PLAIN[kind])
    elif dataclasses.is_dataclass(kind):
        made = _object(typing.cast("type", kind))
    elif origin is Literal:
        made = _one_of(inner)
    elif origin in (Union, types.UnionType):
        made = _either([_reader(one) for one in inner], " or ".join(_called(one) for one in inner))
    elif origin is tuple:
        made = _list(_reader(inner[0]))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        made = _mapping(_reader(inner[1]))
    else:
        raise TypeError(f"no JSON for {kind}")
    return made


def _plain(kinds: tuple[type, ...], called: str) -> _Read:
    def read(value: Any, wrong: list[str]) -> Any:  # noqa: ANN401 - any JSON value
        if type(value) not in kinds:
            wrong.append(f": {shown(value, 40)} is not {called}")
        return value

    return read


def _one_of(allowed: tuple[Any, ...]) -> _Read:
    def read(value: Any, wrong: list[str]) -> Any:  # noqa: ANN401 - any JSON value
        if not any(value == one and type(value) is type(one) for one in allowed):
            wrong.append(f": {shown(value, 40)} is not one of {', '.join(map(str, allowed))}")
        return value

    return read


def _either(readers: list[_Read], called: str) -> _Read:
    def read(value: Any, wrong: list[str]) -> Any:  # noqa: ANN401 - any JSON value
        tries: list[list[str]] = []
        for one in readers:
            tries.append([])
            found = one(value, tries[-1])
            if not tries[-1]:
                return found
        inner = [found for found in tries if not found[0].startswith(":")]  # it is an object: say what of it is wrong
        wrong += inner[0] if inner else [f": {shown(value, 40)} is not {called}"]
        return value

    return read


def _list(item: _Read) -> _Read:
    def read(value: Any, wrong: list[str]) -> tuple[Any, ...]:  # noqa: ANN401 - any JSON value
        if type(value) not in (list, tuple):
            wrong.append(f": {shown(value, 40)} is not a list")
            return ()
        found, before = [], len(wrong)
        for index, one in enumerate(value):
            found.append(item(one, wrong))
            if len(wrong) > before:
                before = _place(wrong, before, f"[{index}]")
        return tuple(found)

    return read


def _mapping(item: _Read) -> _Read:
    def read(value: Any, wrong: list[str]) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        if type(value) is not dict:
            wrong.append(f": {shown(value, 40)} is not an object")
            return {}
        found, before = {}, len(wrong)
        for key, one in value.items():
            found[key] = item(one, wrong)
            if len(wrong) > before:
                before = _place(wrong, before, f"[{shown(key, 40)}]")
        return found

    return read


def _object(cls: type) -> _Read:
    hints, every = typing.get_type_hints(cls), dataclasses.fields(cls)
    fields = {one.name: _reader(hints[one.name]) for one in every}
    missing = dataclasses.MISSING
    needed = {one.name for one in every if one.default is missing and one.default_factory is missing}
    schema: int | None = getattr(cls, "SCHEMA", None)
    derived: tuple[str, ...] = getattr(cls, "DERIVED", ())
    known = {*fields, *derived, *(("schema",) if schema is not None else ())}
    problems: Callable[[Any], Iterable[str]] = getattr(cls, "problems", lambda _: ())

    def read(value: Any, wrong: list[str]) -> Any:  # noqa: ANN401 - any JSON value
        before = first = len(wrong)
        given: dict[str, Any] = {}
        if type(value) is not dict:
            wrong.append(f": {shown(value, 40)} is not an object")
        elif schema is not None and value.get("schema") != schema:
            wrong.append(f".schema: {shown(value.get('schema'), 40)}, and this version reads {schema}")
        else:
            wrong += (f".{name} is missing" for name in sorted(needed - value.keys()))
            wrong += (f".{shown(name, 40)} is not a field of this version" for name in value if name not in known)
            before = len(wrong)
            for name in value.keys() & fields.keys():
                given[name] = fields[name](value[name], wrong)
                if len(wrong) > before:
                    before = _place(wrong, before, f".{name}")
        if len(wrong) > first:
            return None
        found = cls(**given)
        wrong += problems(found)
        if len(wrong) == first:
            wrong += (
                f".{name}: {shown(value[name], 20)} does not fit the rest: the file was edited"
                for name in derived
                if value.get(name) not in (None, getattr(found, name))
            )
        return found

    return read


def _place(wrong: list[str], before: int, place: str) -> int:
    """Put the place of an inner value before what was found wrong with it; return how many lines there are now."""
    wrong[before:] = [f"{place}{line}" for line in wrong[before : before + _MOST]]
    return len(wrong)


def _called(kind: Any) -> str:  # noqa: ANN401 - any annotation
    return _PLAIN[kind][1] if kind in _PLAIN else "an object"
