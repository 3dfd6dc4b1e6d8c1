"""Write the rendered files: compare first, each whole, nothing deleted, nothing outside the tree."""

from __future__ import annotations

from pathlib import Path

from pipeline.contract.errors import UsageError
from pipeline.contract.files import write_whole

from .render import render
from .source import Versions
from .templates import FOLDER, has_templates


class SyncRefused(UsageError):
    """There is nothing to render, or a file could not be written where it belongs."""


def sync(root: Path, versions: Versions) -> list[str]:
    """Render everything, then write what differs; return the changed paths. Nothing is written on any error."""
    if not has_templates(root):
        raise SyncRefused(f"there is no {FOLDER}/ in {root}", hint="`pipeline versions check` works without templates")
    files = render(root, versions).files
    home = root.resolve()
    for path in files:
        if not (root / path).resolve().is_relative_to(home):
            raise SyncRefused(
                f"{path} is a link out of the tree", hint="remove the link, then run `pipeline versions sync`"
            )
    changed = []
    for path, data in files.items():
        try:
            if write_whole(root / path, data, mode=_mode(root / path)):
                changed.append(path)
        except OSError as error:
            raise SyncRefused(f"{path} cannot be written: {error.strerror}") from error
    return changed


def _mode(path: Path) -> int:
    """The permissions that a file has already, or those of a plain file."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0o644
