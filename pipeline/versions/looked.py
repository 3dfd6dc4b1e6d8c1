"""Which files of a tree may hold a version, and as what each is read."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from .findings import Finding
from .source import FILE
from .tree import Tree, is_dockerfile

_REQUIREMENTS = re.compile(r"^(?:requirements|constraints)[^/]*\.(?:txt|in)$")
_NO_TEXT = (
    ".dockerignore",
    ".j2",
    ".jinja",
    ".tmpl",
    ".png",
    ".jpg",
    ".svg",
    ".pdf",
    ".gz",
    ".whl",
    ".zip",
    ".lock",
    ".md",
    ".rst",
)


def looked_at(tree: Tree, findings: list[Finding] | None = None) -> Iterator[str]:
    """Every file that may hold a version, with findings for those that must not be followed."""
    try:
        names = sorted(entry.name for entry in tree.root.iterdir() if entry.is_file() or entry.is_symlink())
    except OSError:
        names = []
    yield from (name for name in names if is_dockerfile(name) or _is_bake(name) or _REQUIREMENTS.match(name))
    for folder in ("docker", "requirements"):
        if (tree.root / folder).exists():
            yield from tree.walk(folder, [] if findings is None else findings)


def kind_of(path: str) -> str | None:
    """How a file is read: `docker`, `requirements`, `hcl`, `json` or `text`; None: not at all."""
    name = posixpath.basename(path)
    end = posixpath.splitext(name)[1].lower()
    if path.startswith("requirements/") or _REQUIREMENTS.match(name):
        return "requirements" if end in (".txt", ".in") else None
    if name == FILE or end in _NO_TEXT:
        return None
    if is_dockerfile(name):
        return "docker"
    return {".hcl": "hcl", ".json": "json"}.get(end, "text")


def _is_bake(name: str) -> bool:
    return bool(re.fullmatch(r"docker-bake[^/]*\.(?:hcl|json)", name))
