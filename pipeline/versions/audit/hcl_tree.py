"""python-hcl2's tree of a bake file as the strings in it, with their paths and lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.versions.bake import Text


def read_hcl_tree(text: str) -> list[Text]:
    """Every string of an HCL file; raises what python-hcl2 raises for one that is none."""
    import hcl2

    return list(_body(hcl2.parses_to_tree(text if text.endswith("\n") else text + "\n"), ()))


def _body(node: Any, path: tuple[str, ...]) -> Iterator[Text]:  # noqa: ANN401 -- lark's trees have no types
    for child in getattr(node, "children", ()):
        kind = getattr(child, "data", "")
        if kind == "block":
            names = tuple(
                _plain(part) for part in child.children if getattr(part, "data", "") in ("identifier", "string")
            )
            for part in child.children:
                if getattr(part, "data", "") == "body":
                    yield from _body(part, (*path, *names))
        elif kind == "attribute":
            yield from _values(child, (*path, _plain(child.children[0])))
        else:
            yield from _body(child, path)


def _values(node: Any, path: tuple[str, ...]) -> Iterator[Text]:  # noqa: ANN401
    for child in getattr(node, "children", ())[1 if getattr(node, "data", "") == "attribute" else 0 :]:
        kind = getattr(child, "data", "")
        if kind == "object_elem":
            yield from _values_of(child.children[-1], (*path, _plain(child.children[0])))
        else:
            yield from _values_of(child, path)


def _values_of(node: Any, path: tuple[str, ...]) -> Iterator[Text]:  # noqa: ANN401
    kind = getattr(node, "data", "")
    if kind == "string":
        yield Text(path, int(next(node.scan_values(lambda _token: True)).line), _plain(node))
    elif kind in ("heredoc_template", "heredoc_template_trim"):
        first = next(node.scan_values(lambda _token: True))
        yield Text(path, int(first.line) + 1, "\n".join(str(first).strip().split("\n")[1:-1]))
    else:
        yield from _values(node, path)


def _plain(node: Any) -> str:  # noqa: ANN401
    tokens = "".join(str(token) for token in node.scan_values(lambda _token: True))
    return tokens.strip().strip('"').rstrip("= \t:").strip('"')
