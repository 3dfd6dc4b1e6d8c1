"""Every place that a version reaches."""

from __future__ import annotations

import re
from pathlib import Path

from .looked import looked_at
from .meaning import collect
from .render import render
from .sites import Site
from .source import FILE, Versions
from .templates import has_templates
from .tree import Tree, Unreadable, decode


def where(root: Path, versions: Versions, name: str) -> list[Site]:
    """Places of a name, sorted by file and line: versions.json, templates, and what `check` holds against it.

    A place is there whether or not it agrees; `wrong` says which do not.
    """
    tree = Tree(root)
    meaning = collect(tree, versions)
    reaching = [other for other in versions if name in versions.closure([other])]  # itself, and what is made of it
    sites = {site for site in meaning.sites if site.name in reaching}
    uses = render(root, versions).uses if has_templates(root) else {}
    for other in reaching:
        kind = "source" if other == name else "tie"
        sites.add(Site(FILE, versions.variables[other].line, other, kind, f"{other}={versions[other]}"))
        sites |= {Site(path, line, other, "template", "{{ " + other + " }}") for path, line in uses.get(other, ())}
        known = {(site.path, site.line) for site in sites}
        sites |= {site for site in _references(tree, other) if (site.path, site.line) not in known}
    return sorted(sites)


def _references(tree: Tree, name: str) -> set[Site]:
    """Lines that use the name itself: `$NAME`, `${NAME…}`, a bake argument `NAME = NAME`."""
    found: set[Site] = set()
    used = re.compile(rf"\$\{{?{re.escape(name)}\b|\[[\"']{re.escape(name)}[\"']\]|=\s*{re.escape(name)}\b")
    for path in looked_at(tree):
        try:
            text = decode(tree.read(path))[0]
        except Unreadable:
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if not line.lstrip().startswith("#") and used.search(line):
                found.add(Site(path, number, name, "reference", line.strip()))
    return found
