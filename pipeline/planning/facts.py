"""What a model's config.json says about its matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .problems import Problems

# model_type values whose layers are laid out as `gemms.py` assumes; anything else would be a guess.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
KNOWN = DENSE


@dataclass(frozen=True)
class Facts:
    """Sizes in elements, of the whole model before it is spread over ranks; `dtype` is a torch dtype name."""

    name: str
    family: str
    dtype: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def _size(config: Mapping[str, object], name: str, problems: Problems, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        shown = "is missing" if name not in config else f"is {value!r}, not a positive whole number"
        problems.add(f"config.json: {name} {shown}", "is this the config.json of a language model?")
        return 1
    return value


def read_facts(name: str, config: Mapping[str, object], problems: Problems) -> Facts:
    """Read the facts of one model; what is missing or wrong is added to `problems`."""
    family = str(config.get("model_type", ""))
    if family not in KNOWN:
        problems.add(
            f"config.json: model_type {family!r} is not one that this pipeline can plan",
            f"known: {', '.join(sorted(KNOWN))}",
        )
    hidden, heads = _size(config, "hidden_size", problems), _size(config, "num_attention_heads", problems)
    return Facts(
        name=name,
        family=family,
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        layers=_size(config, "num_hidden_layers", problems),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size", problems),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", problems, default=heads),
        head_dim=_size(config, "head_dim", problems, default=max(1, hidden // heads)),
        vocab=_size(config, "vocab_size", problems),
    )
