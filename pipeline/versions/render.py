"""Rendering all templates of a tree, beside what this process does and within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.beside import OutOfBounds, Tell, beside

from .findings import Finding
from .source import Versions
from .templates import Files, Rendered, TemplatesInvalid, Uses, fill
from .tree import Overlay


@contextmanager
def rendering(
    root: Path, versions: Versions, changed: Mapping[str, bytes] | None = None
) -> Iterator[Callable[[], Rendered]]:
    """Begin to render all templates, some of them perhaps `changed`, and give a function that waits for the files.

    It raises `TemplatesInvalid` with every problem of every template, or with the one that has no end. Jinja2 is
    imported and works beside this process: reading what the files of a tree mean takes as long, and needs none of it.
    """

    def work(tell: Tell) -> tuple[Files, Uses, list[tuple[Any, ...]]]:
        try:
            return (*fill(Overlay(root, changed or {}), versions, tell), [])
        except TemplatesInvalid as error:
            return {}, {}, [tuple(finding) for finding in error.findings]

    with beside(work) as answer:

        def files() -> Rendered:
            try:
                filled, uses, wrong = answer()
            except OutOfBounds as error:
                endless = f"cannot be rendered: {error.what}; is there a loop without end?"
                raise TemplatesInvalid([Finding(error.at, 0, 0, endless, "render")]) from None
            if wrong:
                raise TemplatesInvalid([Finding(*one) for one in wrong])
            return Rendered(filled, uses)

        yield files


def render(root: Path, versions: Versions, changed: Mapping[str, bytes] | None = None) -> Rendered:
    """Render all templates in memory, some of them perhaps `changed`; raise `TemplatesInvalid`."""
    with rendering(root, versions, changed) as files:
        return files()
