"""MODEL: the name of a bundled model, or a path to a config.json or to the folder that holds one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import UsageError

BUNDLED = Path(__file__).resolve().parent.parent / "models"


class ModelUnknown(UsageError):
    """No bundled model and no path has this name."""


class ModelUnreadable(UsageError):
    """A model's config.json is missing or broken."""


@dataclass(frozen=True)
class Found:
    """A model's display name, where its config came from, and the config itself."""

    name: str
    source: str
    config: Mapping[str, Any]


def bundled_names() -> list[str]:
    """The names of the bundled models, sorted without regard to case."""
    return sorted((path.stem for path in BUNDLED.glob("*.json")), key=str.casefold)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ModelUnreadable(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}", hint="download the model's config.json again"
        ) from None
    except UnicodeDecodeError:
        raise ModelUnreadable(f"{path}: not UTF-8 text", hint="MODEL takes a config.json, not weights") from None
    except OSError as error:
        raise ModelUnreadable(
            f"{path}: {error.strerror}", hint="check the path and that you may read the file"
        ) from None
    if not isinstance(value, dict):
        raise ModelUnreadable(
            f"{path}: {type(value).__name__}, not a JSON object", hint="MODEL takes a model's config.json"
        )
    return value


def _bundled(model: str) -> Found | None:
    for name in bundled_names():
        if name.casefold() == model.casefold():
            value = _load(BUNDLED / f"{name}.json")
            return Found(name, str(value["source"]), value["config"])
    return None


def _from_path(path: Path) -> Found:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnreadable(f"{path} holds no config.json", hint="MODEL takes a model's folder or config.json")
        path = path / "config.json"
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Found(name or "model", str(path), _load(path))


def find_model(model: str) -> Found:
    """Find a model; raise `ModelUnknown` (with near names) or `ModelUnreadable`."""
    model = model.strip()
    if found := _bundled(model):
        return found
    path = Path(model).expanduser()
    if model and path.exists():
        return _from_path(path)
    if model.endswith(".json") or model.startswith((".", "/", "~")):
        raise ModelUnreadable(f"{model}: no such file or folder", hint="MODEL takes a model's folder or config.json")
    import difflib

    names = bundled_names()
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(model.casefold(), folded, n=1, cutoff=0.5)
    hint = f"did you mean {folded[near[0]]}? " if near else ""
    raise ModelUnknown(
        f"there is no model {model!r}",
        hint=f"{hint}models: {', '.join(names)}; or a path to a config.json",
    )
