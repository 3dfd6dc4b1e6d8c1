"""Staged contexts of this run: addressed by what they are made from, made once, shared by all runs of one user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.digest import sha256_file, sha256_json
from pipeline.contract.plan import Plan
from pipeline.contract.scratch import scratch

from . import contexts

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Staging:
    """The folder of staged contexts below the cache home."""

    home: Path

    @property
    def folder(self) -> Path:
        """Where contexts lie."""
        return self.home / "contexts"

    def directory(self, name: str, content: object, make: Callable[[Path], Path]) -> Path:
        """The context `name` made from `content`: made beside its place and renamed into it, or there already."""
        place = self.folder / f"{name}-{sha256_json([contexts.STAGING, content])[:24]}"
        if place.is_dir():
            return place
        self.folder.mkdir(parents=True, exist_ok=True)
        with scratch(self.folder, ".context-") as temporary:
            made = make(temporary / "made")
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # another run staged the same
                    raise
        return place

    def code(self) -> Path:
        """Our code that runs in the image."""
        return self.directory("code", code_content(), lambda place: contexts.stage_code(PACKAGE, place))

    def plan(self, plan: Plan) -> Path:
        """plan.json."""
        return self.directory("plan", plan.to_json(), lambda place: contexts.stage_plan(plan, place))

    def previous(self, previous: Path | None, digest: str) -> Path:
        """An earlier cache root whose `tree_digest` is known, or an empty folder."""
        return self.directory("previous", digest, lambda place: contexts.stage_previous(previous, place))

    def modules(self, root: Path) -> Path:
        """Compiled modules."""
        return self.directory("modules", tree_digest(root), lambda place: contexts.stage_modules(root, place))

    def empty(self) -> Path:
        """A folder with nothing in it: the main context, and what stands for modules where there are none."""
        return self.directory("empty", "", lambda place: contexts.stage_previous(None, place))


@functools.cache
def code_content() -> dict[str, str]:
    """Path and sha256 of every file that runs in the image, as it was when this run first asked."""
    names = [PACKAGE / name for name in contexts.SHIPPED_MODULES]
    for room in contexts.SHIPPED_ROOMS:
        names += [p for p in (PACKAGE / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(path.relative_to(PACKAGE)): sha256_file(path) for path in sorted(names)}


def tree_digest(root: Path | None) -> str:
    """sha256 over a folder's files; empty when there is none."""
    if root is None:
        return ""
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return sha256_json({str(p.relative_to(root)): sha256_file(p) for p in files})
