"""MODEL: the name of a bundled model, a path to a config.json or to the folder that holds one, or a hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import UsageError

BUNDLED = Path(__file__).resolve().parent.parent / "models"
LARGEST_FILE = 8 << 20  # bytes; a config.json has a few thousand
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


class ModelUnknown(UsageError):
    """No bundled model, path or hub id has this name."""


class ModelUnreadable(UsageError):
    """A model's config.json is missing or broken."""


@dataclass(frozen=True)
class Found:
    """A model's display name, where its config came from, the config itself, and whether the hub gave it."""

    name: str
    source: str
    config: Mapping[str, Any]
    from_hub: bool = False


def bundled_names() -> list[str]:
    """The names of the bundled models, sorted without regard to case."""
    return sorted((path.stem for path in BUNDLED.glob("*.json")), key=str.casefold)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST_FILE + 1)  # a device has no size, and may never end
        if len(data) > LARGEST_FILE:
            raise ModelUnreadable(
                f"{path} is too large for a config.json", hint="MODEL takes a config.json, not weights"
            )
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise ModelUnreadable(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}", hint="download the model's config.json again"
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, nested too deep
        raise ModelUnreadable(f"{path}: not JSON text", hint="MODEL takes a config.json, not weights") from None
    except OSError as error:
        raise ModelUnreadable(
            f"{path}: {error.strerror}", hint="check the path and that you may read the file"
        ) from None
    if not isinstance(value, dict):
        raise ModelUnreadable(f"{path} holds no JSON object", hint="MODEL takes a model's config.json")
    return value


def _bundled(model: str) -> Found | None:
    wanted = model.casefold()
    for name in bundled_names():
        if name.casefold() == wanted:
            value = _load(BUNDLED / f"{name}.json")
            return Found(name, str(value["source"]), value["config"])
    if "/" in model:
        for name in bundled_names():  # a hub id whose facts are here needs no network
            value = _load(BUNDLED / f"{name}.json")
            if str(value.get("hub", "")).casefold() == wanted:
                return Found(name, str(value["source"]), value["config"])
    return None


def usual_tp(model: str) -> int:
    """The tensor parallel size of a bundled model where none is asked for: 2 for `tiny`, so that ranks must agree."""
    for name in bundled_names():
        if name.casefold() == model.casefold():
            return int(_load(BUNDLED / f"{name}.json").get("tp", 1))
    return 1


def _beside(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older modelopt checkpoints keep their quantization in a file of its own beside config.json."""
    beside = path.parent / "hf_quant_config.json"
    if "quantization_config" in config or not beside.is_file():
        return config
    inner = _load(beside).get("quantization")
    if not isinstance(inner, dict):
        raise ModelUnreadable(f"{beside} has no quantization", hint="download the checkpoint's files again")
    return {**config, "quantization_config": {"quant_method": "modelopt", **inner}}


def _from_path(path: Path) -> Found:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnreadable(f"{path} holds no config.json", hint="MODEL takes a model's folder or config.json")
        path = path / "config.json"
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Found(name or "model", str(path), _beside(path, _load(path)))


def _near(model: str) -> str:
    import difflib

    folded = {name.casefold(): name for name in bundled_names()}
    near = difflib.get_close_matches(model.rpartition("/")[2].casefold(), folded, n=1, cutoff=0.5)
    return f"did you mean {folded[near[0]]}? " if near else ""


def find_model(model: str) -> Found:
    """Find a model; raise `ModelUnknown` (with near names), `ModelUnreadable` or `HubRefused`."""
    model = model.strip()
    if not model:
        raise ModelUnknown("no model was named", hint=f"MODEL=tiny, for one; there are {', '.join(bundled_names())}")
    if found := _bundled(model):
        return found
    try:
        exists = Path(model).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL
        exists = False
    if exists:
        return _from_path(Path(model).expanduser())
    if model.endswith(".json") or model.startswith((".", "/", "~")):
        raise ModelUnreadable(f"{model}: no such file or folder", hint="MODEL takes a model's folder or config.json")
    offer = f"{_near(model)}models: {', '.join(bundled_names())}; or a path to a config.json"
    if HUB_ID.fullmatch(model):
        from .hub import fetch_config

        return Found(
            model.partition("@")[0].rpartition("/")[2], model, _load(fetch_config(model, offer)), from_hub=True
        )
    raise ModelUnknown(f"there is no model {model!r}", hint=f"{offer} or a hub id")
