"""Offering a key to an engine that writes where it reads: a copy in a writable directory, and the variable for it.

The manifest's `options["layout"]` says how (`pipeline.cache.layouts.describe`). The baked files stay as they are.
"""

# Importing pathlib takes longer than all that this module does.
# ruff: noqa: PTH103, PTH105, PTH118, PTH120, PTH123
from __future__ import annotations

import os

from pipeline.cache.engine_variables import OFFERED, enters_028
from pipeline.cache.pick import Baked
from pipeline.contract.places import ENGINE_DIR

from .words import differing
from .workspace import own_directory

_UNKNOWN = "its manifest describes no layout that this entry point knows"


def offer(chosen: Baked, environment: dict[str, str], command: list[str]) -> tuple[str, str]:
    """Copy and set the variable. Returns what keeps the engine from finding it, and what else is worth saying.

    Both are empty where the key needs nothing (our own layout). A variable that is set already is the user's, and is
    left alone. Where only words of the command differ the copy is offered all the same: most options, though not all,
    enter the engine's hash, and a copy that it does not look for costs nothing.
    """
    layout = chosen.options.get("layout")
    if not isinstance(layout, dict):
        return "", ""
    variable = str(layout.get("variable", ""))
    below = f"{ENGINE_DIR}/{layout.get('directory', '')}/"
    files = [name for name in chosen.files if name.startswith(below)]
    if variable not in OFFERED or not files or any({"", ".", ".."} & set(name.split("/")) for name in files):
        return _UNKNOWN, ""
    changed = _changed(layout.get("variables"), environment)
    if changed:
        return f"the engine's own hash changes with {', '.join(changed)}", ""
    other, said = differing(layout, command)
    if environment.get(variable):
        return other, f"{variable} is set already, and left alone"
    place = own_directory(environment, f"tuned-{chosen.key.rpartition('/')[2][:16]}")
    if not place:
        return f"no directory is writable for a copy: set {variable}", ""
    for name in files:
        _copy(os.path.join(os.path.dirname(chosen.path), name), os.path.join(place, name[len(ENGINE_DIR) + 1 :]))
    environment[variable] = place
    return other, said


def _changed(tuned: object, environment: dict[str, str]) -> list[str]:
    """Variables that entered the engine's hash with another value, or that enter it now and did not."""
    if not isinstance(tuned, dict):
        return []
    now = {name: value for name, value in environment.items() if enters_028(name)}
    return sorted(name for name in {*tuned, *now} if tuned.get(name) != now.get(name))


def _copy(source: str, target: str) -> None:
    folder, name = os.path.split(target)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(source, "rb") as stream:
        data = stream.read()
    aside = os.path.join(folder, f".{name}.{os.getpid()}")
    with open(aside, "wb") as out:
        out.write(data)
    os.replace(aside, target)
