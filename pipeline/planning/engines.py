"""`ENGINE=vllm ENGINE_ARGS='/models/x --tensor-parallel-size 2'`: an engine's own start as a plan.

ENGINE_ARGS are the words after the engine's serve command, the same as at run time. From them come the model's path
and the number of ranks; from MODEL the config.json that stands in for the model.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import EngineRun, Layout

from .model_source import HUB_ID, LARGEST_FILE, ModelUnreadable, fetch_config

ENGINES = ("vllm", "sglang")
# Beside config.json these decide how a model is quantized; nothing else of its folder is laid out.
CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json")
_SIZES = {
    "tp": ("tensor-parallel-size", "tp-size", "tp"),
    "pp": ("pipeline-parallel-size", "pp-size", "pp"),
    "dp": ("data-parallel-size", "dp-size", "dp"),
    "ep": ("expert-parallel-size", "ep-size", "ep"),
}
_MOST = 1024


class EngineArgumentsWrong(UsageError):
    """ENGINE, ENGINE_ARGS, ENGINE_ENV or MODEL do not make a start of an engine."""


@dataclass(frozen=True)
class Start:
    """An engine's start, its version not known yet, and how its arguments spread the model over ranks."""

    run: EngineRun
    layout: Layout


def engine_start(name: str, arguments: str, variables: str, model: str) -> Start | None:
    """The start that ENGINE and its kin ask for; None where they ask for none. Raises `EngineArgumentsWrong`."""
    name = name.strip().lower()
    if not name:
        if arguments.strip() or variables.strip():
            raise EngineArgumentsWrong("ENGINE_ARGS without ENGINE", hint=f"ENGINE={'|'.join(ENGINES)}")
        return None
    if name not in ENGINES:
        raise EngineArgumentsWrong(f"there is no engine {name!r}", hint=f"ENGINE={'|'.join(ENGINES)}")
    words = _split(arguments, "ENGINE_ARGS")
    path = _model_path(name, words)
    run = EngineRun(name, "", path, tuple(words), _variables(variables), _config(model))
    return Start(run, _layout(name, words))


def _split(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise EngineArgumentsWrong(f"{what} cannot be split into words: {error}", hint="quote as in a shell") from error


def _model_path(name: str, words: Sequence[str]) -> str:
    example = "/models/x --tensor-parallel-size 2" if name == "vllm" else "--model-path /models/x --tp-size 2"
    hint = f"ENGINE_ARGS='{example}': the words that follow the serve command at run time"
    named = _values(words, "model-path", "model")
    positional = words[0] if name == "vllm" and words and not words[0].startswith("-") else None
    path = positional or (named[-1] if named else "")
    if not path:
        raise EngineArgumentsWrong("ENGINE_ARGS name no model", hint=hint)
    if not re.fullmatch(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9_.][A-Za-z0-9_.+@ -]*)+/?", path):
        raise EngineArgumentsWrong(
            f"{path!r} is no absolute path, and the engine's hash covers the path's spelling",
            hint="give the path at which the model lies in the container at run time; a hub id becomes a path there",
        )
    if _values(words, "config"):
        raise EngineArgumentsWrong("ENGINE_ARGS name a --config file, which is not here", hint="spell its options out")
    return path


def _layout(name: str, words: Sequence[str]) -> Layout:
    sizes = {size: _size(words, *names) for size, names in _SIZES.items()}
    if name == "vllm":
        sizes["tp"] = max(sizes["tp"], _size(words, "tp"))
        sizes["ep"] = sizes["tp"] * sizes["dp"] if _flag(words, "enable-expert-parallel") else 1
    elif _flag(words, "enable-dp-attention"):
        sizes["dp"] = 1  # there it divides the tensor parallel ranks, and adds none
    return Layout(**sizes)


def _size(words: Sequence[str], *names: str) -> int:
    values = _values(words, *names)
    if not values:
        return 1
    if not re.fullmatch(r"[0-9]{1,5}", values[-1]) or not 1 <= int(values[-1]) <= _MOST:
        raise EngineArgumentsWrong(f"--{names[0]} {values[-1]!r} is no number of ranks", hint=f"1 to {_MOST}")
    return int(values[-1])


def _values(words: Sequence[str], *names: str) -> list[str]:
    """The values of an option, however it is spelled: `--x v`, `--x=v`, underscores, one dash for vLLM's short ones."""
    found = []
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name.lstrip("-").replace("_", "-") in names:
            found.append(value if equals else "".join(words[at + 1 : at + 2]))
    return found


def _flag(words: Sequence[str], name: str) -> bool:
    return any(word.startswith("--") and word.lstrip("-").replace("_", "-") == name for word in words)


def _variables(text: str) -> dict[str, str]:
    found = {}
    for word in _split(text, "ENGINE_ENV"):
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise EngineArgumentsWrong(f"ENGINE_ENV: {word!r} is not NAME=VALUE", hint="ENGINE_ENV='VLLM_X=1 Y=2'")
        if re.search(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", name.upper()):
            raise EngineArgumentsWrong(
                f"ENGINE_ENV: {name} looks like a secret, and would be written into the image",
                hint="vLLM 0.28 hashes VLLM_API_KEY: give --api-key at run time instead",
            )
        found[name] = value
    return found


def _config(model: str) -> dict[str, str]:
    """The text of config.json, and of what lies beside it and says how the model is quantized."""
    place = _folder(model.strip())
    found = {}
    for name in CONFIG_FILES:
        file = place / name
        if name != "config.json" and not file.is_file():
            continue
        try:
            if file.stat().st_size > LARGEST_FILE:
                raise ModelUnreadable(f"{file} is too large", hint="MODEL takes a config.json, not weights")
            found[name] = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or "is not UTF-8"
            raise ModelUnreadable(f"{file}: {said}", hint="MODEL takes a model's folder or config.json") from error
    return found


def _folder(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.name == "config.json" and path.is_file():
        return path.parent
    if HUB_ID.fullmatch(model) and not path.exists():
        return fetch_config(model, "a folder with a config.json").parent
    raise EngineArgumentsWrong(
        f"ENGINE= needs the model's whole config.json, and MODEL={model} is no folder that holds one",
        hint="MODEL=/path/to/model (or its config.json), or a hub id; the bundled models hold a few facts only",
    )
