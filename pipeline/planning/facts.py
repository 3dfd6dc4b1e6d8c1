"""What a model's config.json says about its matrix products, before the model is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.cache.finding import shown

from .problems import Problems

# model_type values whose layers are laid out as `parts.py` assumes; for any other a plan would be a guess.
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "glm4")
DTYPES = ("bfloat16", "float16", "float32")
LARGEST_SIZE = 1 << 24
MOST_LAYERS = 4096
# What a config.json without head_dim means, where that is not the hidden size by heads (transformers' config classes)
HEAD_DIM = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 256)
_SHOWN = 60  # characters of a config's value in a message


@dataclass(frozen=True)
class MoeKeys:
    """Where one family keeps its MoE facts in config.json, and what its modules are called below a layer.

    `shared` is the key of the shared expert's size: a count of experts (`n_shared_experts`) or channels. `first_dense`:
    the first layers are dense, `first_k_dense_replace` of them; else `decoder_sparse_step` may leave some dense.
    `router_float32`: servers keep the router's weight in float32.
    """

    experts: str
    intermediate: str
    router: str = "mlp.gate"
    modules: str = "mlp.experts"
    shared: str = ""
    shared_modules: str = "mlp.shared_experts"
    first_dense: bool = False
    router_float32: bool = False
    mla: bool = False


_DEEPSEEK = MoeKeys("n_routed_experts", "moe_intermediate_size", shared="n_shared_experts", first_dense=True, mla=True)
_QWEN = MoeKeys("num_experts", "moe_intermediate_size")
_MIXTRAL = MoeKeys("num_local_experts", "intermediate_size", "block_sparse_moe.gate", "block_sparse_moe.experts")
MOE = {
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, router_float32=True),
    "qwen2_moe": replace(_QWEN, shared="shared_expert_intermediate_size", shared_modules="mlp.shared_expert"),
    "qwen3_moe": _QWEN,
    "gpt_oss": MoeKeys("num_local_experts", "intermediate_size", "mlp.router"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": replace(_DEEPSEEK, mla=False, router_float32=True),
}
KNOWN = (*DENSE, *MOE)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: ranks of the low-rank projections (`q_rank` 0: none) and sizes per head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Moe:
    """The MoE layers: which they are, experts per layer and per token, channels of one expert and of the shared one.

    `renormalized`: the shares of the chosen experts are made to add up to one.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    intermediate: int
    shared: int = 0
    groups: int = 0
    top_groups: int = 0
    bias: bool = False
    renormalized: bool = True
    activation: str = "swiglu"
    keys: MoeKeys = field(default=MOE["mixtral"])


@dataclass(frozen=True)
class Facts:
    """Sizes in elements of the whole model. `dtype` is a torch dtype name, `drafts` counts draft (MTP) layers."""

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
    moe: Moe | None = None
    mla: Mla | None = None
    drafts: int = 0
    parts_left_out: tuple[str, ...] = ()


def _told(value: object) -> str:
    """A config's value in a message, however long it is."""
    return shown(repr(value), _SHOWN)


class _Reader:
    """Reads sizes of one config and notes what is missing or wrong; a wrong size reads as 1, and is among `wrong`."""

    def __init__(self, config: Mapping[str, object], problems: Problems) -> None:
        self.config = config
        self.problems = problems
        self.wrong: set[str] = set()

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_SIZE) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is int and least <= value <= most:
            return value
        self.wrong.add(name)
        if value is None:
            self.problems.add(f"config.json: {name} is missing", "is this the config.json of a language model?")
        else:
            self.problems.add(f"config.json: {name} is {_told(value)}, not a whole number from {least} to {most}")
        return max(1, least)

    def misfit(self, message: str, *names: str) -> None:
        """Note that sizes do not fit together, unless one of them is wrong by itself, which is said already."""
        if self.wrong.isdisjoint(names):
            self.problems.add(f"config.json: {message}")

    def indices(self, name: str) -> frozenset[int]:
        value = self.config.get(name) or ()
        if isinstance(value, (list, tuple)) and all(type(i) is int for i in value):
            return frozenset(value)
        self.problems.add(f"config.json: {name} is {_told(value)}, not a list of layer numbers")
        return frozenset()


def _dtype(config: Mapping[str, object], problems: Problems) -> str:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        problems.add(f"config.json: torch_dtype is {_told(dtype)}", f"known: {', '.join(DTYPES)}")
    return dtype


def _moe_layers(family: str, read: _Reader, layers: int) -> tuple[int, ...]:
    """Which decoder layers hold experts; families differ in how they say it."""
    if MOE[family] in (MOE["qwen2_moe"], MOE["qwen3_moe"]):
        step, dense = read.size("decoder_sparse_step", 1), read.indices("mlp_only_layers")
        return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if MOE[family].first_dense:
        first, step = read.size("first_k_dense_replace", 0, least=0), read.size("moe_layer_freq", 1)
        return tuple(i for i in range(layers) if i >= first and i % step == 0)
    return tuple(range(layers))


def _moe(family: str, read: _Reader, layers: int) -> Moe | None:
    keys = MOE.get(family)
    if keys is None or (keys.first_dense and read.config.get(keys.experts) is None):
        return None
    inner = read.size(keys.intermediate)
    experts = read.size(keys.experts)
    top_k = read.size("num_experts_per_tok")
    if top_k > experts:
        read.misfit(f"num_experts_per_tok {top_k} is more than {experts} experts", "num_experts_per_tok", keys.experts)
    oai = family == "gpt_oss"
    return Moe(
        layers=_moe_layers(family, read, layers),
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        shared=_shared(keys, read, inner),
        groups=read.size("n_group", 0, least=0) if keys.first_dense else 0,
        top_groups=read.size("topk_group", 0, least=0) if keys.first_dense else 0,
        bias=oai,
        renormalized=read.config.get("norm_topk_prob", family != "qwen2_moe") is not False,
        activation="swiglu_oai" if oai else "swiglu",
        keys=keys,
    )


def _shared(keys: MoeKeys, read: _Reader, inner: int) -> int:
    """Channels of the shared expert."""
    if not keys.shared:
        return 0
    size = read.size(keys.shared, 0, least=0)
    return inner * size if keys.first_dense else size


def _mla(family: str, read: _Reader) -> Mla | None:
    if family not in MOE or not MOE[family].mla:
        return None
    return Mla(
        q_rank=read.size("q_lora_rank", 0),
        kv_rank=read.size("kv_lora_rank"),
        nope=read.size("qk_nope_head_dim"),
        rope=read.size("qk_rope_head_dim"),
        value=read.size("v_head_dim"),
    )


def read_facts(name: str, config: Mapping[str, object], problems: Problems) -> Facts:
    """Read the facts of one model; what is missing or wrong is added to `problems`.

    Of a model with several towers only the language model (`text_config`) is read, and the rest is named as left out.
    """
    left: tuple[str, ...] = ()
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "hidden_size" not in config:
        left = tuple(sorted(k.removesuffix("_config") for k in config if k in ("vision_config", "audio_config")))
        config = {"torch_dtype": config.get("torch_dtype") or config.get("dtype"), **inner}
    family = str(config.get("model_type", ""))
    if family not in KNOWN:  # of what its layers are, the other keys say nothing
        what = f"model_type {_told(family)} is not one that can be planned" if family else "model_type is missing"
        problems.add(f"config.json: {what}", f"known: {', '.join(sorted(KNOWN))}")
        return Facts(name, family, DTYPES[0], *(1,) * 7)
    read = _Reader(config, problems)
    layers = read.size("num_hidden_layers", most=MOST_LAYERS)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", default=heads)
    if heads % kv_heads and not (family in MOE and MOE[family].mla):
        message = f"{heads} attention heads do not share {kv_heads} key-value heads evenly"
        read.misfit(message, "num_attention_heads", "num_key_value_heads")
    return Facts(
        name=name,
        family=family,
        dtype=_dtype(config, problems),
        layers=layers,
        hidden=hidden,
        intermediate=read.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.size("head_dim", default=HEAD_DIM.get(family, max(1, hidden // heads))),
        vocab=read.size("vocab_size"),
        moe=_moe(family, read, layers) if family in MOE else None,
        mla=_mla(family, read),
        drafts=read.size("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS),
        parts_left_out=left,
    )
