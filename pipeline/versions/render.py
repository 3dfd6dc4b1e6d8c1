"""Templates to files.

templates/Dockerfile.j2             -> docker/Dockerfile
templates/requirements/host.txt.j2  -> requirements/host.txt
templates/_name.j2                  a part that other templates include, rendered to nothing itself

A template directly below templates/ is rendered into docker/, one in a folder into the same folder of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.beside import OutOfBounds, Tell, beside
from pipeline.contract.errors import UsageError

from .findings import Finding, counted
from .source import FILE, Versions
from .tree import Overlay

FOLDER = "templates"
END = ".j2"


class TemplatesInvalid(UsageError):
    """A template cannot be rendered; `findings` lists everything that is wrong with all of them."""

    def __init__(self, findings: list[Finding]) -> None:
        one = len(findings) == 1
        message = findings[0].text() if one else f"{FOLDER}/ has {counted(len(findings), 'error')}"
        details = () if one else tuple(finding.text() for finding in findings)
        super().__init__(message, hint=f"correct {FOLDER}/ or {FILE}, then run `pipeline sync`", details=details)
        self.findings = findings


_Files = dict[str, bytes]
_Uses = dict[str, tuple[tuple[str, int], ...]]  # name -> (template, line), ...


class Rendered(NamedTuple):
    """Every file that the templates give, by its path in the tree, and where each name stands in the templates."""

    files: _Files
    uses: _Uses


def has_templates(root: Path) -> bool:
    """Whether a tree renders anything; one that does not may still be checked."""
    return (root / FOLDER).is_dir()


def target(template: str) -> str:
    """The path in the tree that a template (relative to templates/) is rendered to."""
    path = template.removesuffix(END)
    return path if "/" in path else f"docker/{path}"


@contextmanager
def rendering(
    root: Path, versions: Versions, changed: Mapping[str, bytes] | None = None
) -> Iterator[Callable[[], Rendered]]:
    """Begin to render all templates, some of them perhaps `changed`, and give a function that waits for the files.

    It raises `TemplatesInvalid` with every problem of every template, or with the one that has no end. Jinja2 is
    imported and works beside this process: reading what the files of a tree mean takes as long, and needs none of it.
    """

    def work(tell: Tell) -> tuple[_Files, _Uses, list[tuple[Any, ...]]]:
        from .templates import fill

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
