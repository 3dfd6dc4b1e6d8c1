"""Offering a key to an engine that writes where it reads: a copy in a writable directory, and the variable for it.

The manifest's `options["layout"]` says how (`pipeline.cache.layouts.describe`). The baked files stay as they are.
"""

# Importing pathlib takes longer than all that this module does.
# ruff: noqa: PTH103, PTH105, PTH118, PTH120, PTH123, PTH208
from __future__ import annotations

import os

from pipeline.cache.engine_variables import OFFERED, enters_028
from pipeline.cache.pick import Baked
from pipeline.contract.places import MANIFEST_FILE

from .workspace import own_directory


def offer(chosen: Baked, environment: dict[str, str]) -> tuple[str, str]:
    """Copy and set the variable. Returns what keeps the engine from finding it, and what else is worth saying.

    Both are empty where the key needs nothing (our own layout). A variable that is set already is the user's, and is
    left alone.
    """
    layout = chosen.options.get("layout")
    if not isinstance(layout, dict):
        return "", ""
    variable, directory = str(layout.get("variable", "")), str(layout.get("directory", ""))
    parts = directory.split("/")
    if variable not in OFFERED or not directory or any(part in ("", ".", "..") for part in parts):
        return "its manifest describes no layout that this entry point knows", ""
    changed = _changed(layout.get("variables"), environment)
    if changed:
        return f"the engine's own hash changes with {', '.join(changed)}", ""
    if environment.get(variable):
        return "", f"{variable} is set already, and left alone"
    place = own_directory(environment, f"tuned-{chosen.key.rpartition('/')[2][:16]}")
    if not place:
        return f"no directory is writable for a copy: set {variable}", ""
    _copy(os.path.dirname(chosen.path), os.path.join(place, *parts))
    environment[variable] = place
    return "", ""


def _changed(tuned: object, environment: dict[str, str]) -> list[str]:
    """Variables that entered the engine's hash with another value, or that enter it now and did not."""
    if not isinstance(tuned, dict):
        return []
    now = {name: value for name, value in environment.items() if enters_028(name)}
    return sorted(name for name in {*tuned, *now} if tuned.get(name) != now.get(name))


def _copy(source: str, target: str) -> None:
    os.makedirs(target, mode=0o700, exist_ok=True)
    for name in sorted(os.listdir(source)):
        if name == MANIFEST_FILE:
            continue
        with open(os.path.join(source, name), "rb") as stream:
            data = stream.read()
        aside = os.path.join(target, f".{name}.{os.getpid()}")
        with open(aside, "wb") as out:
            out.write(data)
        os.replace(aside, os.path.join(target, name))
