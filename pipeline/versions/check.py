"""The whole check: the source, the rendered files, and what the files mean, the latter two at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .findings import Finding
from .render import rendering
from .rendered import compare
from .source import Versions, load
from .templates import TemplatesInvalid, has_templates
from .tree import Tree

if TYPE_CHECKING:
    from .agreement import Result
    from .recorded import Record


def check(root: Path) -> Result:
    """Check a whole tree; raise `SourceInvalid` where there is no telling what is right."""
    return check_all(root, load(root))


def check_all(root: Path, versions: Versions, record: Record | None = None) -> Result:
    """Both halves of the check; `record` replaces the recorded copy of packages' requirements."""
    if not has_templates(root):
        from .agreement import check_meaning

        return check_meaning(Tree(root), versions, record=record)
    with rendering(root, versions) as files:
        from .agreement import check_meaning  # not before: its import takes as long as that of jinja2

        def rendered() -> tuple[list[Finding], bool]:
            try:
                return compare(root, files().files), False
            except TemplatesInvalid as error:
                return error.findings, True

        return check_meaning(Tree(root), versions, rendered, record=record)
