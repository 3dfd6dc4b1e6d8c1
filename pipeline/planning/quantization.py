"""How a model's weights are quantized: `quantization_config` of config.json → the scheme of each module.

Formats: `fp8` (with and without `weight_block_size`), `fbgemm_fp8`, `modelopt` (FP8, NVFP4, MXFP8, MIXED_PRECISION of
these), `compressed-tensors` (float 8 and 4 bits), `mxfp4`. Anything else is a scheme that no FlashInfer op takes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from pipeline.contract.text import shown

from .model_config import language_model
from .problems import Problems

PREFIX = "re:"
_LONGEST = 500  # characters of an expression; those of checkpoints have fewer than a hundred
_MOST_REPEATS = 5  # `*`, `+` and `{n,}` of one expression: each may multiply the time by the length of a name
_IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")


class Kind(StrEnum):
    """What the numbers of a weight are, and how far one scale reaches."""

    NONE = "unquantized"
    FP8_TENSOR = "fp8 per tensor"
    FP8_CHANNEL = "fp8 per channel"
    FP8_BLOCK = "fp8 block"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    OTHER = "other"


@dataclass(frozen=True)
class Scheme:
    """A kind, and the block `(n, k)` in elements that one scale covers; `label` names it where the kind does not."""

    kind: Kind
    block: tuple[int, int] = (1, 1)
    label: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.FP8_BLOCK:
            return f"fp8 block {self.block[0]}×{self.block[1]}"
        return self.label or self.kind.value


NONE = Scheme(Kind.NONE)
FP8_TENSOR = Scheme(Kind.FP8_TENSOR)
FP8_CHANNEL = Scheme(Kind.FP8_CHANNEL)
# The checkpoint stores no scale of the activations: vLLM finds one per token as they come (Fp8LinearMethod in
# layers/quantization/fp8.py, CompressedTensorsW8A8Fp8 in compressed_tensors/schemes), and bmm_fp8 takes one in all.
FP8_TOKEN = Scheme(Kind.FP8_CHANNEL, label="fp8, activations scaled per token")
FP8_BLOCK = Scheme(Kind.FP8_BLOCK, (128, 128))
NVFP4 = Scheme(Kind.NVFP4, (1, 16))
MXFP4 = Scheme(Kind.MXFP4, (1, 32))
MXFP8 = Scheme(Kind.MXFP8, (1, 32))


def other(label: str) -> Scheme:
    """A scheme that no FlashInfer op takes, by the name that the config gives it."""
    return Scheme(Kind.OTHER, label=shown(label, 60))


@dataclass(frozen=True)
class Modules:
    """A set of modules: dotted parts of their names, `*`, `?` and `[…]` as in a shell, or `re:` and an expression."""

    patterns: tuple[str, ...] = ()

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(p for p in self.patterns if not p.startswith(PREFIX) and not re.search(r"[*?\[]", p))

    @cached_property
    def _globs(self) -> re.Pattern[str] | None:
        # the standard library translates stars to atomic groups, which never backtrack
        found = [p for p in self.patterns if p not in self._plain and not p.startswith(PREFIX)]
        return re.compile("|".join(map(fnmatch.translate, found))) if found else None

    @cached_property
    def _expressions(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(p.removeprefix(PREFIX)) for p in self.patterns if p.startswith(PREFIX))

    def __contains__(self, name: str) -> bool:
        if self._plain or self._globs:
            parts = name.split(".")
            spans = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
            if not self._plain.isdisjoint(spans) or (self._globs and any(map(self._globs.match, spans))):
                return True
        return any(expression.match(name) for expression in self._expressions)


@dataclass(frozen=True)
class Quantization:
    """The scheme of each module: the first group whose targets hold it, unless it is among the ignored.

    `towers`: the language model is one of several, and the lists name its modules below `language_model`.
    """

    groups: tuple[tuple[Modules | None, Scheme], ...] = ()
    ignored: Modules = field(default_factory=Modules)
    experts_only: bool = False
    towers: bool = False

    def scheme(self, modules: Sequence[str], *, experts: bool = False) -> Scheme:
        """The scheme of a product whose weight is made of `modules` (merged projections are quantized alike)."""
        if self.experts_only and not experts:
            return NONE
        modules = self.spelled(modules)
        if any(name in self.ignored for name in modules):
            return NONE
        for targets, scheme in self.groups:
            if targets is None or any(name in targets for name in modules):
                return scheme
        return NONE

    def unused(self, modules: Sequence[str]) -> list[tuple[str, Scheme]]:
        """The groups whose targets are none of `modules`: the targets, cut to a line, and the scheme."""
        spelled = self.spelled(modules)
        return [
            (shown(", ".join(targets.patterns), 60), scheme)
            for targets, scheme in self.groups
            if targets is not None and not any(name in targets for name in spelled)
        ]

    def spelled(self, modules: Sequence[str]) -> Sequence[str]:
        """Modules by every name that the lists may have for them."""
        if not self.towers:
            return modules
        below = [f"model.language_model.{name.removeprefix('model.')}" for name in modules]
        return [*modules, *(f"language_model.{name}" for name in modules), *below]


def _strings(value: object) -> Iterable[str]:
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else []


def _block(value: object) -> tuple[int, int] | None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
        return value[0], value[1]
    return None


def _float8(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> Scheme:
    strategy = str(weights.get("strategy") or "tensor")
    if strategy == "block":
        return Scheme(Kind.FP8_BLOCK, _block(weights.get("block_structure")) or (128, 128))
    if strategy == "group":
        return MXFP8 if weights.get("group_size") == 32 else other(f"fp8 groups of {weights.get('group_size')}")
    if not activations:
        return other("fp8 weights alone")
    if strategy != "tensor":
        return FP8_CHANNEL
    stored = str(activations.get("strategy") or "tensor") == "tensor" and activations.get("dynamic") in (None, False)
    return FP8_TENSOR if stored else FP8_TOKEN


def _group(group: Mapping[str, Any]) -> Scheme:
    """One entry of `config_groups`, as compressed-tensors and modelopt write them."""
    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    if not isinstance(weights, Mapping) or not isinstance(activations, Mapping):
        return other("config_groups that cannot be read")
    bits, kind = weights.get("num_bits"), str(weights.get("type", "int"))
    if kind == "float" and bits == 8:
        return _float8(weights, activations)
    if kind == "float" and bits == 4:
        size = weights.get("group_size")
        if not activations:
            return other("fp4 weights alone")
        return {16: NVFP4, 32: MXFP4}.get(size if type(size) is int else 0) or other(f"fp4 groups of {size}")
    return other(f"{kind}{bits}")


def _config_groups(config: Mapping[str, Any]) -> tuple[tuple[Modules | None, Scheme], ...]:
    found: list[tuple[Modules | None, Scheme]] = []
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            targets = tuple(_strings(group.get("targets")))
            # `Linear` is the class of every projection, not a name
            found.append((None if not targets or "Linear" in targets else Modules(targets), _group(group)))
    return tuple(found)


_MODELOPT = {
    "FP8": FP8_TENSOR,
    "FP8_PB_WO": FP8_BLOCK,
    "FP8_BLOCK_SCALES": FP8_BLOCK,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "NVFP4": NVFP4,
    "MXFP8": MXFP8,
}


def _one_scheme(method: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a method that has only one for the whole model; None where `config_groups` say it."""
    if method == "fp8":
        if config.get("weight_block_size") is None:
            return FP8_TENSOR if config.get("activation_scheme") == "static" else FP8_TOKEN
        block = _block(config["weight_block_size"])
        return Scheme(Kind.FP8_BLOCK, block) if block else other("fp8 with an unreadable block")
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo") or "").upper()
        return _MODELOPT.get(algorithm) or (other(f"{method} {algorithm}") if algorithm else None)
    return {"fbgemm_fp8": FP8_CHANNEL, "mxfp4": MXFP4, "compressed-tensors": None}.get(method, other(method))


def _mixed(layers: Mapping[str, Any]) -> tuple[tuple[Modules | None, Scheme], ...]:
    """ModelOpt's MIXED_PRECISION, an algorithm for each module, as vLLM 0.33 and SGLang 0.5.23 read it."""
    named: dict[str, list[str]] = {}
    for name, one in layers.items():
        if isinstance(one, Mapping):
            named.setdefault(str(one.get("quant_algo")).upper(), []).append(str(name))
    return tuple((Modules(tuple(names)), _MODELOPT.get(each) or other(f"modelopt {each}"))
                 for each, names in named.items())  # fmt: skip


def _groups(method: str, config: Mapping[str, Any]) -> tuple[tuple[Modules | None, Scheme], ...]:
    if isinstance(config.get("quantized_layers"), Mapping):
        return _mixed(config["quantized_layers"])
    scheme = _one_scheme(method, config)
    return ((None, scheme),) if scheme else _config_groups(config)


def _check_expression(text: str) -> str:
    """Why an expression of a config is refused; empty where it may be matched.

    `re` has no time limit, and a repeated group can take years. Those of checkpoints repeat no group.
    """
    if len(text) > _LONGEST:
        return f"which is longer than {_LONGEST} characters"
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return f"which is no regular expression: {error}"
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", text)  # escapes and character classes say nothing here
    if re.search(r"\)[*+{]", bare):
        return "which repeats a group, and may never end"
    return f"which has more than {_MOST_REPEATS} repeats" if len(re.findall(r"[*+{]", bare)) > _MOST_REPEATS else ""


def _method(config: Mapping[str, Any]) -> str:
    """`quant_method`, or what a checkpoint without one was made by: ModelOpt writes its producer and its algorithm."""
    if named := str(config.get("quant_method") or "").lower():
        return named
    producer = config.get("producer")
    if config.get("quant_algo") or (isinstance(producer, Mapping) and producer.get("name") == "modelopt"):
        return "modelopt"
    return "compressed-tensors" if isinstance(config.get("config_groups"), Mapping) else ""


def _find(config: Mapping[str, object]) -> object:
    """`quantization_config`, beside `text_config` or inside it."""
    places = (config, language_model(config) or {})
    return next(
        (one[key] for one in places for key in ("quantization_config", "compression_config") if one.get(key)), None
    )


def read_quantization(config: Mapping[str, object], problems: Problems) -> Quantization:
    """Read the quantization of a config.json; a model without one is unquantized."""
    value = _find(config)
    if value is None:
        return Quantization()
    if not isinstance(value, Mapping):
        problems.add(f"config.json: quantization_config is {type(value).__name__}, not an object")
        return Quantization()
    inner = value.get("quantization")  # as in hf_quant_config.json
    value = {**value, **inner} if isinstance(inner, Mapping) else value
    method = _method(value)
    if not method:
        problems.add(
            "config.json: quantization_config has no quant_method", "say how: fp8, modelopt, awq, bitsandbytes, …"
        )
        return Quantization()
    groups = _groups(method, value)
    if not groups and not {"quant_algo", "config_groups"} & set(
        value
    ):  # there and empty: the KV cache alone is quantized
        problems.add(
            f"config.json: quantization_config of {shown(method, 60)} has neither quant_algo nor config_groups"
        )
    lists = {key: tuple(_strings(value.get(key))) for key in _IGNORED}
    targets = tuple(name for names, _ in groups if names for name in names.patterns)
    for key, names in {**lists, "config_groups": targets}.items():
        for name in (name for name in names if name.startswith(PREFIX)):
            if why := _check_expression(name.removeprefix(PREFIX)):
                problems.add(
                    f"config.json: quantization_config.{key} names {shown(repr(name), 60)}, {why}",
                    "simplify it, or list the modules",
                )
    if problems.found:
        return Quantization()
    ignored = Modules(tuple(name for names in lists.values() for name in names))
    return Quantization(groups, ignored, method == "mxfp4", towers=language_model(config) is not None)
