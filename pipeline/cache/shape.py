"""JSON Schemas of the files that the rooms share, made from their dataclasses, and the check of a value on reading.

The annotations are the only source: `schema_of` spells them as JSON Schema (committed under docs/schema, held against
the dataclasses by a test), `violations` checks a value against such a schema. A file is so checked before anything is
built from it, and every field that is wrong is named at once with its path.

    python -m pipeline.cache.shape docs/schema       writes the schemas again after a dataclass has changed
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

from pipeline.contract import manifest, plan, record, verdict
from pipeline.contract.files import write_json

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
    if _fits(name)(value):
        return found
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


_FAST: dict[str, frozenset[type]] = {
    "string": frozenset({str}),
    "boolean": frozenset({bool}),
    "integer": frozenset({int}),
    "number": frozenset({int, float}),
    "null": frozenset({type(None)}),
}


def _compiled(rules: Mapping[str, Any]) -> frozenset[type] | Callable[[Any], bool]:
    """The types that a value may have, or a predicate: a sound file of 10,000 rows is checked in some 30 ms."""
    kind = rules.get("type")
    if not rules:
        return lambda _: True
    if kind in _FAST:
        return _FAST[kind]
    if "const" in rules or "enum" in rules:
        allowed = rules.get("enum", [rules.get("const")])
        return lambda value: value in allowed
    if "anyOf" in rules:
        return _any(_compiled(one) for one in rules["anyOf"])
    if kind == "array":
        item = _compiled(rules["items"])
        return lambda value: type(value) is list and all(_is(item, one) for one in value)
    return _compiled_object(rules)


def _any(parts: Iterable[frozenset[type] | Callable[[Any], bool]]) -> frozenset[type] | Callable[[Any], bool]:
    kinds = list(parts)
    plain = frozenset().union(*(kind for kind in kinds if isinstance(kind, frozenset)))
    rest = [kind for kind in kinds if not isinstance(kind, frozenset)]
    return (lambda value: type(value) in plain or any(test(value) for test in rest)) if rest else plain


def _compiled_object(rules: Mapping[str, Any]) -> Callable[[Any], bool]:
    properties = {name: _compiled(one) for name, one in rules.get("properties", {}).items()}
    required, other = frozenset(rules.get("required", ())), rules["additionalProperties"]
    more = None if other is False else _compiled(other)

    def test(value: Any) -> bool:  # noqa: ANN401 - any JSON value
        if type(value) is not dict or not required <= value.keys():
            return False
        for name, one in value.items():
            kind = properties.get(name, more)
            if kind is None or not (type(one) in kind if type(kind) is frozenset else kind(one)):  # type: ignore[operator]
                return False
        return True

    return test


def _is(kind: frozenset[type] | Callable[[Any], bool], value: Any) -> bool:  # noqa: ANN401 - any JSON value
    return type(value) in kind if isinstance(kind, frozenset) else kind(value)


@cache
def _fits(name: str) -> Callable[[Any], bool]:
    test = _compiled(schema(name))
    return lambda value: _is(test, value)


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


if __name__ == "__main__":
    for file in FILES:
        write_json(Path(sys.argv[1]) / f"{file}.json", schema(file))
