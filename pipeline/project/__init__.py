"""Where the files of a project are: versions.json, templates/, docker/, requirements/; and how a new project begins.

A project is the nearest folder, from the current one upwards, that has versions.json and docker/. Where there is none,
the files that came with this package count: in a checkout its root, in an installed package a copy beside this module.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pipeline import __version__
from pipeline.contract.errors import UsageError
from pipeline.contract.files import is_taken, whole_folder

PACKAGE = Path(__file__).resolve().parent.parent
_OWN = Path(__file__).resolve().parent
_FILES = {"Makefile": "Makefile", "gitignore": ".gitignore", "check.yml": ".github/workflows/check.yml"}
_FOLDERS = ("templates", "docker", "requirements")
_DEVELOPMENT = "dev"  # the lock for working on the pipeline itself, which a project has no use for


def root() -> Path:
    """The project of the current folder, or the files that came with this package."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed meanwhile
        return shipped()
    for folder in (here, *here.parents):
        if (folder / "versions.json").is_file() and (folder / "docker").is_dir():
            return folder
    return shipped()


def shipped() -> Path:
    """The files that came with this package."""
    return _OWN if (_OWN / "versions.json").is_file() else PACKAGE.parent


def create(place: Path) -> list[Path]:
    """Begin a project, whole or not at all, in a folder that is new or empty; return its files. Raises `UsageError`."""
    if is_taken(place):
        raise UsageError(f"{place} is not an empty folder", hint="name a new one: pipeline init DIR")
    source = shipped()
    versions = json.loads((source / "versions.json").read_text(encoding="utf-8"))
    versions["locks"].pop(_DEVELOPMENT)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror}", hint="name a folder that you may make") from error
    with whole_folder(place) as made:
        for name in _FOLDERS:
            shutil.copytree(source / name, made / name, ignore=shutil.ignore_patterns(f"{_DEVELOPMENT}.*"))
        (made / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")
        for name, target in _FILES.items():
            text = (_OWN / name).read_text(encoding="utf-8").replace("@VERSION@", __version__)
            (made / target).parent.mkdir(parents=True, exist_ok=True)
            (made / target).write_text(text, encoding="utf-8")
    return sorted(file for file in place.rglob("*") if file.is_file())
