"""The model's config files where the server looks for them: at its path, or in a Hub cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.contract.errors import UsageError
from pipeline.planning.model_source import LARGEST_FILE, UNSEEN, find_model

from .words import Words

# Beside config.json these decide how a model is quantized; nothing else of its folder is laid out.
BESIDE = ("hf_quant_config.json", "quantize_config.json", "generation_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Bundled models hold what a plan needs; a server asks for the class too. Source: the names in transformers.
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM", "gpt_oss": "GptOssForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A name that can stand in an image's name, the text of the config files by name, and what is worth saying."""

    name: str
    files: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_model(model: str) -> Model:
    """MODEL as planning finds it: a bundled model, a folder or its config.json, or a hub id. Raises `UsageError`."""
    found = find_model(model)
    name = re.sub(r"[^a-z0-9._-]+", "-", found.name.lower()).strip("-._") or "model"
    if found.from_hub:
        return Model(name, {"config.json": json.dumps(found.config)}, (*found.notes, UNSEEN))
    source = Path(found.source)
    if not source.is_file():  # a bundled one
        architecture = _CLASSES.get(str(found.config.get("model_type")))
        more = {"max_position_embeddings": 2048, **({"architectures": [architecture]} if architecture else {})}
        return Model(name, {"config.json": json.dumps({**more, **found.config})}, found.notes)
    beside = {name: source.parent / name for name in BESIDE}
    files = {"config.json": source, **{name: path for name, path in beside.items() if path.is_file()}}
    return Model(name, {name: _text(path) for name, path in files.items()}, found.notes)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            text = stream.read(LARGEST_FILE).decode("utf-8")
        if not isinstance(json.loads(text), dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: {said}", hint="MODEL takes a model's folder or its config.json") from error
    return text


def laid(words: Words, files: Mapping[str, str], home: str) -> dict[str, str]:
    """Absolute path → text of what the server reads. `home` is HF_HOME, for a model that is a hub id.

    A hub id needs the commit that production serves, since an offline server's hash holds the snapshot's path. Its
    default lies in the user's home, where another user does not look.
    """
    if words.model.startswith("/"):
        return {str(PurePosixPath(words.model, name)): text for name, text in files.items()}
    if not home.startswith("/"):
        raise UsageError(
            f"{words.model} is a hub id, and no HF_HOME says where its snapshot lies",
            hint="SERVER_ENV='HF_HUB_OFFLINE=1 HF_HOME=/models/hf', as in production, for every user",
        )
    commit = words.options.get("revision", "")
    if not _COMMIT.fullmatch(commit):
        raise UsageError(
            f"{words.model} is a hub id, and SERVER_ARGS name no commit",
            hint="--revision <the 40 digits of the commit>: an offline server's hash contains it",
        )
    top = PurePosixPath(home, "hub", f"models--{words.model.replace('/', '--')}")
    snapshot = top / "snapshots" / commit
    return {**{str(snapshot / name): text for name, text in files.items()}, str(top / "refs" / commit): commit}
