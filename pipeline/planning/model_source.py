"""MODEL: the name of a bundled model, a path to a config.json or to the folder that holds one, or a hub id."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pipeline.contract.errors import UsageError
from pipeline.contract.text import closest

BUNDLED = Path(__file__).resolve().parent.parent / "models"
LARGEST_FILE = 8 << 20  # bytes; a config.json has a few thousand
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
PROBE_SECONDS = 5.0
_TAKES = "MODEL takes a model's folder or config.json"
UNSEEN = (
    "only config.json was read from the hub: a quantization that stands in a file beside it is not seen; "
    "give the checkpoint's folder as MODEL if it has one"
)


class ModelUnknown(UsageError):
    """No bundled model, path or hub id has this name."""


class ModelUnreadable(UsageError):
    """A model's config.json is missing or broken."""


class HubRefused(UsageError):
    """The hub did not give a config.json."""


@dataclass(frozen=True)
class Found:
    """A model's display name, where its config came from, the config itself, and notes about the choice.

    `from_hub`: the hub gave config.json, and no file beside it was read.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    from_hub: bool = False


def bundled_names() -> list[str]:
    """The names of the bundled models, sorted without regard to case."""
    return sorted((path.stem for path in BUNDLED.glob("*.json")), key=str.casefold)


def usual_tp(model: str) -> int:
    """The tensor parallel size of a bundled model where none is asked for: 2 for `tiny`, so that ranks must agree."""
    for name in bundled_names():
        if name.casefold() == model.strip().casefold():
            return int(_load(BUNDLED / f"{name}.json").get("tp", 1))
    return 1


def find_model(model: str) -> Found:
    """Find a model; raise `ModelUnknown` (with near names), `ModelUnreadable` or `HubRefused`."""
    model = model.strip()
    if not model:
        raise ModelUnknown("no model was named", hint=f"MODEL=tiny, for example; known: {', '.join(bundled_names())}")
    local = _existing(model)
    if found := _bundled(model):
        if local is None or not (local / "config.json").is_file():
            return found
        note = f"planned is the bundled {found.name}, not the folder {model} here: write ./{model} for that one"
        return replace(found, notes=(note,))
    if local is not None:
        return _from_path(local)
    if model.endswith(".json") or model.startswith((".", "/", "~")):
        raise ModelUnreadable(f"{model}: no such file or folder", hint=_TAKES)
    offer = f"{_near(model)}models: {', '.join(bundled_names())}; or a path to a config.json"
    if HUB_ID.fullmatch(model):
        name = model.partition("@")[0].rpartition("/")[2]
        return Found(name, model, _load(fetch_config(model, offer)), from_hub=True)
    raise ModelUnknown(f"there is no model {model!r}", hint=f"{offer} or a hub id")


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL
        return None


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST_FILE + 1)  # a device has no size, and may never end
        if len(data) > LARGEST_FILE:
            raise ModelUnreadable(f"{path} is too large for a config.json", hint=f"{_TAKES}, not weights")
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise ModelUnreadable(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}", hint="download the model's config.json again"
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, nested too deep
        raise ModelUnreadable(f"{path}: not JSON text", hint=f"{_TAKES}, not weights") from None
    except OSError as error:
        hint = "check the path and that you may read the file"
        raise ModelUnreadable(f"{path}: {error.strerror}", hint=hint) from None
    if not isinstance(value, dict):
        raise ModelUnreadable(f"{path} contains no JSON object", hint=_TAKES)
    return value


def _bundled(model: str) -> Found | None:
    """The bundled model of a name or of the hub id that it stands for, which then needs no network."""
    wanted = model.casefold()
    for name in bundled_names():
        if name.casefold() == wanted or "/" in model:
            value = _load(BUNDLED / f"{name}.json")
            if wanted in (name.casefold(), str(value.get("hub", "")).casefold()):
                return Found(name, str(value["source"]), value["config"])
    return None


def _from_path(path: Path) -> Found:
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelUnreadable(f"{path.parent} contains no config.json", hint=_TAKES)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Found(name or "model", str(path), _with_quantization(path, _load(path)))


def _with_quantization(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older modelopt checkpoints keep their quantization in a file of its own beside config.json."""
    beside = path.parent / "hf_quant_config.json"
    if "quantization_config" in config or not beside.is_file():
        return config
    inner = _load(beside).get("quantization")
    if not isinstance(inner, dict):
        raise ModelUnreadable(f"{beside} has no quantization", hint="download the checkpoint's files again")
    return {**config, "quantization_config": {"quant_method": "modelopt", **inner}}


def _near(model: str) -> str:
    near = closest(model.rpartition("/")[2], bundled_names())
    return f"did you mean {near}? " if near else ""


def _answers(endpoint: str) -> bool:
    """Whether the hub, or the proxy towards it, can be reached at all: the client would try for half a minute.

    Raises `ValueError` where `endpoint` is no address, `HubRefused` where the proxy's is none.
    """
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    host, proxies = parts.hostname or "", getproxies()
    named = [name for name in (parts.scheme, "all") if proxies.get(name)]
    if named:
        if proxy_bypass(host):
            return True  # only the client knows the way
        try:
            way = urlsplit(proxies[named[0]] if "://" in proxies[named[0]] else f"http://{proxies[named[0]]}")
            host, port = way.hostname or "", way.port or {"http": 80, "https": 443}.get(way.scheme, 1080)
        except ValueError:
            raise HubRefused(
                f"{named[0].upper()}_PROXY is not a proxy's address", hint="http://HOST:PORT is expected"
            ) from None
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


def _by_proxy() -> str:
    """The variables that name a proxy, for a message about the hub; their values may have a password."""
    names = [name for name in sorted(os.environ) if name.lower() in {"https_proxy", "http_proxy", "all_proxy"}]
    return f" (through the proxy of {', '.join(names)})" if names else ""


def fetch_config(model: str, instead: str) -> Path:
    """The path of config.json of `owner/name` or `owner/name@revision`, downloaded or from the client's cache.

    Raises `HubRefused`; `instead` is what its hint offers.
    """
    try:
        import huggingface_hub  # reads its variables here
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        offline = constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)
    except ValueError as error:
        names = [name for name in sorted(os.environ) if name.startswith("HF_")]
        quoted = [name for name in names if repr(os.environ[name]) in str(error)]  # others' values may be secrets
        what = ", ".join(quoted or names) or "its settings"
        raise HubRefused(
            f"the hub's client does not accept {what}: {error}", hint=f"correct or unset it; {instead}"
        ) from None
    repository, _, revision = model.partition("@")
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repository, "config.json", revision=revision or None, local_files_only=offline
            )
        )
    except errors.GatedRepoError:
        problem = f"{repository} is gated on the hub and this account has no access"
    except errors.RepositoryNotFoundError:
        problem = f"the hub has no model {repository}, or it is private"
    except errors.RevisionNotFoundError:
        problem = f"{repository} has no revision {revision!r} on the hub"
    except errors.LocalEntryNotFoundError:
        problem = f"{model} is not in the local cache and the hub cannot be reached{_by_proxy()}"
    except errors.EntryNotFoundError:
        problem = f"{repository} has no config.json on the hub"
    except Exception as error:  # noqa: BLE001 - the client's libraries have many kinds, for settings and paths too
        problem = f"{model}: {(str(error).splitlines() or [type(error).__name__])[0]}{_by_proxy()}"
    raise HubRefused(problem, hint=instead)
