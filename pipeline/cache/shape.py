"""JSON Schemas of the files that the rooms share, made from their dataclasses, and the check of a value on reading.

The annotations are the only source: `schema_of` spells them as JSON Schema (committed under docs/schema, held against
the dataclasses by a test), `violations` checks a value against such a schema. A file is so checked before anything is
built from it, and every field that is wrong is named at once with its path.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union

from pipeline.contract import manifest, plan, record, verdict

from .finding import shown

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MOST = 50
_PLAIN: dict[object, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
}

# file -> (dataclass, top-level keys that its to_json adds)
FILES: dict[str, tuple[type, dict[str, dict[str, Any]]]] = {
    "plan": (plan.Plan, {"schema": {"const": plan.SCHEMA}, "digest": {"type": "string"}}),
    "manifest": (manifest.Manifest, {"schema": {"const": manifest.SCHEMA}}),
    "record": (record.Record, {}),
    "verdict": (verdict.Verdict, {"schema": {"const": verdict.SCHEMA}}),
}


@cache
def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of `plan`, `manifest`, `record` or `verdict`, as it is committed."""
    cls, _ = FILES[name]
    return {"$schema": _DRAFT, "title": f"{name}.json", **_object(cls)}


def violations(name: str, value: object) -> list[str]:
    """What keeps a value from being such a file, as `path: what`, at most 50; empty when nothing does."""
    found: list[str] = []
    for wrong in _check(schema(name), value, "$"):
        found.append(wrong)
        if len(found) >= _MOST:
            break
    return found


def _object(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    added = next((more for known, more in FILES.values() if known is cls), {})
    properties = dict(added)
    required = [key for key, kind in added.items() if "const" in kind]
    for one in dataclasses.fields(cls):
        properties[one.name] = _spelled(hints[one.name])
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            required.append(one.name)
    return {
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _spelled(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - any annotation
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast("type", kind))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_spelled(one) for one in inner]}
    if origin is tuple:
        return {"type": "array", "items": _spelled(inner[0])}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _spelled(inner[1])}
    raise TypeError(f"no JSON Schema for {kind}")


_TYPES: dict[str, Callable[[object], bool]] = {
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: type(v) is int,
    "number": lambda v: type(v) in (int, float),
    "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def _check(rules: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - any JSON value
    kind = rules.get("type")
    if kind is not None and not _TYPES[kind](value):
        yield f"{path}: {shown(value, 40)} is not of type {kind}"
    elif "const" in rules and value != rules["const"]:
        yield f"{path}: {shown(value, 40)} is not {rules['const']}"
    elif "enum" in rules and value not in rules["enum"]:
        yield f"{path}: {shown(value, 40)} is not one of {', '.join(map(str, rules['enum']))}"
    elif "anyOf" in rules:
        if all(any(True for _ in _check(one, value, path)) for one in rules["anyOf"]):
            kinds = " or ".join(str(one.get("type", "an object")) for one in rules["anyOf"])
            yield f"{path}: {shown(value, 40)} is not of type {kinds}"
    elif kind == "array":
        for index, one in enumerate(value):
            yield from _check(rules["items"], one, f"{path}[{index}]")
    elif kind == "object":
        yield from _check_object(rules, value, path)


def _check_object(rules: Mapping[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    properties, other = rules.get("properties", {}), rules["additionalProperties"]
    for name in rules.get("required", ()):
        if name not in value:
            yield f"{path}.{name} is missing"
    for name, one in value.items():
        if name in properties:
            yield from _check(properties[name], one, f"{path}.{name}")
        elif other is False:
            yield f"{path}.{shown(name, 40)} is not a field of this version"
        elif other:
            yield from _check(other, one, f"{path}[{shown(name, 40)}]")
