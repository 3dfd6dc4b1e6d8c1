"""requirements/recorded.json: a copy of what the index said that each package requires; `versions bump` keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from .findings import Finding
from .located_json import parse, plain
from .relations import canonical
from .tree import Tree, Unreadable

RECORD = "requirements/recorded.json"
HINT = "`pipeline versions bump --refresh` records it"


class Recorded(NamedTuple):
    """One package's own words: its exact version, the extras that were asked for, and what it requires."""

    version: str
    extras: tuple[str, ...]
    requires_python: str
    requires_dist: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "version": self.version,
            "extras": list(self.extras),
            "requires_python": self.requires_python,
            "requires_dist": list(self.requires_dist),
        }


Record = Mapping[str, Recorded]  # canonical name -> what it requires


def load_record(tree: Tree) -> tuple[Record | None, list[Finding]]:
    """The recorded copy, None where the tree has none, and what is wrong with the file."""
    try:
        text = tree.read(RECORD).decode("utf-8")
    except Unreadable as error:
        missing = error.finding.message == "is missing"
        return None, [] if missing else [error.finding]
    except UnicodeDecodeError:
        return None, [Finding(RECORD, 0, 0, "is not UTF-8", "metadata")]
    whole = plain(text)
    if whole is None:
        document = parse(text)
        if document.problems:
            places = [(*document.place(at), message) for at, message in document.problems]
            return None, [Finding(RECORD, line, column, message, "metadata") for line, column, message in places]
        whole = json.loads(text)
    found: dict[str, Recorded] = {}
    wrong: list[Finding] = []
    packages = whole.get("packages") if isinstance(whole, dict) else None
    for name, entry in packages.items() if isinstance(packages, dict) else ():
        try:
            found[canonical(name)] = Recorded(
                str(entry["version"]),
                tuple(map(str, entry["extras"])),
                str(entry["requires_python"]),
                tuple(map(str, entry["requires_dist"])),
            )
        except (KeyError, TypeError):
            wrong.append(Finding(RECORD, 0, 0, f"the entry of {name} is not one; {HINT}", "metadata"))
    return found, wrong


def dump_record(record: Record) -> bytes:
    """The bytes of the recorded copy: sorted, so that a diff shows what changed."""
    packages = {name: record[name].to_json() for name in sorted(record)}
    comment = "Written by `pipeline versions bump`: what the index said that each pinned package requires."
    return (json.dumps({"_comment": comment, "packages": packages}, indent=2) + "\n").encode()
