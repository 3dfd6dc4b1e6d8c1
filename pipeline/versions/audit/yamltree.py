"""PyYAML's nodes to places: versions by key and by name, build arguments, images, and command lines in strings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .commands import WORTH, image, script_places
from .places import Place, is_version, variable_stem

_GIVEN = re.compile(r"^\s*[\"']?([A-Za-z_]\w*)=[\"']?([^\s\"'$`{}\\]+)[\"']?\s*$")
_BUILD_ARGS = frozenset({"build-args", "build_args", "buildargs"})  # of docker/build-push-action and its like
_IMAGES = frozenset({"image", "container"})
_DEEPEST = 60
_COMMANDS = re.compile(WORTH)


def nodes(path: str, node: Any, within: tuple[str, ...] = ()) -> Iterator[Place]:  # noqa: ANN401 -- PyYAML's nodes
    """Every place in a node; `within` are the keys above it."""
    kind = getattr(node, "id", "")
    if len(within) > _DEEPEST:
        return
    if kind == "sequence":
        for item in node.value:
            if item.id == "scalar":
                yield from _item(path, str(item.value), item.start_mark.line + 1, within)
            yield from nodes(path, item, (*within, "-"))
    elif kind == "mapping":
        pairs = [(key.value, key.start_mark.line + 1, value) for key, value in node.value if key.id == "scalar"]
        for key, line, value in pairs:
            if value.id == "scalar":
                yield from _pair(path, key, value, line, within)
        yield from _named(path, {key: value for key, _, value in pairs})
        for key, value in node.value:
            yield from nodes(path, value, (*within, str(key.value) if key.id == "scalar" else "?"))
    elif kind == "scalar" and _COMMANDS.search(node.value):
        yield from script_places(path, str(node.value), _first(node))


def _first(scalar: Any) -> int:  # noqa: ANN401
    """The line on which a scalar's text begins."""
    return int(scalar.start_mark.line) + (2 if scalar.style in ("|", ">") else 1)


def _holds_build_args(within: tuple[str, ...]) -> bool:
    """Whether what stands here is a build argument: of compose (`build: args:`), or of an action."""
    return bool(within) and (within[-1].lower() in _BUILD_ARGS or within[-2:] == ("build", "args"))


def _pair(path: str, key: str, value: Any, line: int, within: tuple[str, ...]) -> Iterator[Place]:  # noqa: ANN401
    text = str(value.value)
    if _holds_build_args(within):
        if _GIVEN.match(f"{key}={text}"):
            yield Place(path, line, "build-arg", key, text, variable_stem(key))
    elif key.lower() in _BUILD_ARGS:
        for number, row in enumerate(text.split("\n"), _first(value)):
            yield from _given(path, row, number, "build-arg")
    elif key.lower().endswith("_version") and is_version(text):
        yield Place(path, line, "yaml", key, text, variable_stem(key))
    elif key in _IMAGES:
        yield from image(path, line, text)


def _item(path: str, text: str, line: int, within: tuple[str, ...]) -> Iterator[Place]:
    """`- NAME=value`: a build argument, or an environment variable of a service."""
    if _holds_build_args(within):
        yield from _given(path, text, line, "build-arg")
    else:
        yield from (place for place in _given(path, text, line, "yaml") if _is_versions(place.name, place.value))


def _given(path: str, text: str, line: int, kind: str) -> Iterator[Place]:
    match = _GIVEN.match(text)
    if match:
        yield Place(path, line, kind, match[1], match[2], variable_stem(match[1]))


def _named(path: str, values: dict[str, Any]) -> Iterator[Place]:
    """`name: X_VERSION` beside `value: 1.2`, as Kubernetes lists an environment."""
    name, value = values.get("name"), values.get("value")
    if name is None or value is None or not name.id == value.id == "scalar":
        return
    if _is_versions(name.value, value.value):
        yield Place(path, value.start_mark.line + 1, "yaml", name.value, value.value, variable_stem(name.value))


def _is_versions(name: str, value: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*_version", name, re.IGNORECASE) is not None and is_version(value)
