"""The model's config files where the server looks for them: at its path, or in a Hub cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from pipeline.contract.errors import UsageError

from .words import Words, values

# Beside config.json these decide how a model is quantized; nothing else of its folder is laid out.
CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "generation_config.json")
LARGEST = 8 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Bundled models hold what a plan needs; a server asks for the class too. Source: the names in transformers.
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM", "gpt_oss": "GptOssForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip


def config_files(model: str, root: Path) -> dict[str, str]:
    """Name → text of MODEL's config files: a folder, its config.json, or a bundled model. Raises `UsageError`.

    `root` is the folder of the bundled models.
    """
    path = Path(model).expanduser()
    bundled = root / f"{model}.json"
    if re.fullmatch(r"[\w.-]+", model) and bundled.is_file() and not path.exists():
        return {"config.json": json.dumps(complete(json.loads(bundled.read_text(encoding="utf-8"))["config"]))}
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and (path.suffix != ".json" or not path.is_file()):
        raise UsageError(
            f"SERVER= needs the model's whole config.json, and MODEL={model} is no folder that holds one",
            hint="MODEL=/path/to/model (or its config.json), or a bundled model such as tiny",
        )
    found = {}
    for name in CONFIG_FILES:
        file = path if name == "config.json" and path.is_file() else folder / name
        if name != "config.json" and not file.is_file():
            continue
        try:
            if file.stat().st_size > LARGEST:
                raise UsageError(f"{file} is too large", hint="MODEL takes a config.json, not weights")
            text = file.read_bytes().decode("utf-8")
            if not isinstance(json.loads(text), dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{file}: {said}", hint="MODEL takes a model's folder or its config.json") from error
        found[name] = text
    return found


def short_name(model: str) -> str:
    """A name for MODEL that can stand in an image's name."""
    path = Path(model).expanduser()
    name = path.parent.resolve().name if path.name == "config.json" else path.name
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


def complete(config: Mapping[str, object]) -> dict[str, object]:
    """A bundled model's config with what a server asks for beside it."""
    name = _CLASSES.get(str(config.get("model_type")))
    return {"max_position_embeddings": 2048, **({"architectures": [name]} if name else {}), **config}


def laid(words: Words, files: Mapping[str, str], home: str) -> dict[str, str]:
    """Absolute path → text of what the server reads. `home` is HF_HOME, for a model that is a hub id.

    A hub id needs the commit that production serves, since an offline server's hash holds the snapshot's path.
    """
    if words.model.startswith("/"):
        return {str(PurePosixPath(words.model, name)): text for name, text in files.items()}
    given = values(words.arguments, "revision")
    if not given or not _COMMIT.fullmatch(given[-1]):
        raise UsageError(
            f"{words.model} is a hub id, and SERVER_ARGS name no commit",
            hint="--revision <the 40 digits of the commit>: an offline server's hash holds it",
        )
    top = PurePosixPath(home, "hub", f"models--{words.model.replace('/', '--')}")
    snapshot = top / "snapshots" / given[-1]
    return {**{str(snapshot / name): text for name, text in files.items()}, str(top / "refs" / given[-1]): given[-1]}
