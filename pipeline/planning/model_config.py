"""What a model's config.json says about its matrix products, before the model is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.contract.text import shown

from .problems import Problems

DTYPES = ("bfloat16", "float16", "float32")
LARGEST_SIZE = 1 << 24
MOST_LAYERS = 4096
_SHOWN = 60  # characters of a config's value in a message

# model_type values whose layers are laid out as `sharding.py` assumes; for any other a plan would be a guess.
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "glm4")
# Language models of a model with several towers, whose layers are those of another family
SAME_LAYERS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# model_type of a whole model -> of its text_config where that names none (`sub_configs` of transformers' classes)
TEXT_TYPE = {
    "gemma3": "gemma3_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "head_dim"),
)
# What a field means that a text_config leaves out: transformers writes there only what differs from the class's own
# values (its configuration_<family>.py), 0 that the class has none. At the top of a config.json it writes every field.
_CLASS_SIZES: dict[str, tuple[int, ...]] = {
    "llama": (4096, 11008, 32, 32, 0, 32000),
    "mistral": (4096, 14336, 32, 32, 8, 32000),
    "qwen2": (4096, 22016, 32, 32, 32, 151936),
    "qwen2_vl_text": (8192, 29568, 80, 64, 8, 152064),
    "qwen2_5_vl_text": (8192, 29568, 80, 64, 8, 152064),
    "qwen3": (4096, 22016, 32, 32, 32, 151936, 128),
    "qwen3_vl_text": (4096, 22016, 32, 32, 32, 151936, 128),
    "qwen3_vl_moe_text": (2048, 5632, 24, 16, 16, 151936),
    "gemma": (3072, 24576, 28, 16, 16, 256000, 256),
    "gemma2": (2304, 9216, 26, 8, 4, 256000, 256),
    "gemma3_text": (2304, 9216, 26, 8, 4, 262208, 256),
}
# What a config.json without head_dim means, where that is not the hidden size by heads
_HEAD_DIM = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 256)


@dataclass(frozen=True)
class MoeKeys:
    """Where one family keeps its MoE sizes in config.json, and what its modules are called below a layer.

    `experts_too` is a second key for the number of experts, which transformers' class takes for the first
    (`attribute_map`, 5.24.0). `shared` is the key of the shared expert's size: a count of experts (`n_shared_experts`)
    or channels. `first_dense`: the first layers are dense, `first_k_dense_replace` of them; else `decoder_sparse_step`
    may leave some dense. `router_float32`: servers keep the router's weight in float32.
    """

    experts: str
    intermediate: str
    router: str = "mlp.gate"
    modules: str = "mlp.experts"
    experts_too: str = ""
    shared: str = ""
    shared_modules: str = "mlp.shared_experts"
    first_dense: bool = False
    router_float32: bool = False
    mla: bool = False


_DEEPSEEK = MoeKeys("n_routed_experts", "moe_intermediate_size", shared="n_shared_experts", first_dense=True, mla=True)
_QWEN = MoeKeys("num_experts", "moe_intermediate_size")
_MIXTRAL = MoeKeys(
    "num_local_experts", "intermediate_size", "block_sparse_moe.gate", "block_sparse_moe.experts",
    experts_too="num_experts",
)  # fmt: skip
MOE = {
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, router_float32=True),
    "qwen2_moe": replace(_QWEN, shared="shared_expert_intermediate_size", shared_modules="mlp.shared_expert"),
    "qwen3_moe": replace(_QWEN, experts_too="num_local_experts"),  # transformers 5 saves it under this name
    "gpt_oss": MoeKeys("num_local_experts", "intermediate_size", "mlp.router", experts_too="num_experts"),
    "deepseek_v2": replace(_DEEPSEEK, experts_too="num_experts"),
    "deepseek_v3": replace(_DEEPSEEK, experts_too="num_local_experts"),
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": replace(_DEEPSEEK, experts_too="num_local_experts", mla=False, router_float32=True),
}
_SHARES_AS_THEY_ARE = ("qwen2_moe", "qwen3_moe")  # `norm_topk_prob` is false where their configs leave it out
KNOWN = (*DENSE, *MOE, *SAME_LAYERS)


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

    `renormalized`: the weights of the chosen experts are made to add up to one.
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
class ModelConfig:
    """Sizes in elements of the whole model. `dtype` is a torch dtype name, `drafts` counts draft (MTP) layers.

    `assumed` names the fields that the file leaves out and that have the class's own value.
    """

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
    assumed: tuple[str, ...] = ()


class _Reader:
    """Reads sizes of one config and notes what is missing or wrong; a wrong size reads as 1."""

    def __init__(self, config: Mapping[str, object], defaults: Mapping[str, int], problems: Problems) -> None:
        self.config = config
        self.defaults = defaults
        self.problems = problems
        self.assumed: list[str] = []

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_SIZE) -> int:
        value = self.config.get(name)
        if value is None and name in self.defaults:
            self.assumed.append(f"{name} {self.defaults[name]}")
            return self.defaults[name]
        if value is None and default is not None:
            return default
        if type(value) is int and least <= value <= most:
            return value
        if value is None:
            self.problems.add(f"config.json: {name} is missing", self._hint(name))
        else:
            self.problems.add(
                f"config.json: {name} is {shown(repr(value), _SHOWN)}, not a whole number from {least} to {most}"
            )
        return max(1, least)

    def stated(self, name: str) -> int:
        """A size that may be null or 0 for none, and must not be left out: the class's own value is another."""
        return self.size(name, 0 if name in self.config else None, least=0)

    def _hint(self, name: str) -> str:
        near = sorted(key for key in self.config if key.endswith("_experts")) if name.endswith("_experts") else ()
        if near:
            return f"it has {shown(', '.join(near), _SHOWN)}: servers read {name}"
        return "is this the config.json of a language model?"

    def mismatch(self, message: str) -> None:
        """Note that sizes do not fit together, unless one is wrong by itself."""
        if not self.problems.found:
            self.problems.add(f"config.json: {message}")

    def layer_numbers(self, name: str) -> frozenset[int]:
        value = self.config.get(name) or ()
        if isinstance(value, (list, tuple)) and all(type(i) is int for i in value):
            return frozenset(value)
        self.problems.add(f"config.json: {name} is {shown(repr(value), _SHOWN)}, not a list of layer numbers")
        return frozenset()


def _dtype(config: Mapping[str, object], problems: Problems) -> str:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        problems.add(f"config.json: torch_dtype is {shown(repr(dtype), _SHOWN)}", f"known: {', '.join(DTYPES)}")
    return dtype


def _moe_layers(keys: MoeKeys, read: _Reader, layers: int) -> tuple[int, ...]:
    """Which decoder layers hold experts; families differ in how they say it."""
    if keys.experts == _QWEN.experts:
        step, dense = read.size("decoder_sparse_step", 1), read.layer_numbers("mlp_only_layers")
        return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if keys.first_dense:
        first, step = read.stated("first_k_dense_replace"), read.size("moe_layer_freq", 1)
        return tuple(i for i in range(layers) if i >= first and i % step == 0)
    return tuple(range(layers))


def _moe(kind: str, family: str, read: _Reader, layers: int) -> Moe | None:
    """The MoE layers; None where all layers are dense.

    A missing number of experts is a problem as long as any layer holds some: servers would take the class's number.
    """
    keys = MOE.get(family)
    if keys is None:
        return None
    held = _moe_layers(keys, read, layers)
    count = keys.experts if keys.experts in read.config or keys.experts_too not in read.config else keys.experts_too
    says_none = count in read.config and read.config[count] is None
    if keys.first_dense and (not held or (says_none and read.config.get("num_experts_per_tok") is None)):
        return None
    inner, experts, top_k = read.size(keys.intermediate), read.size(count), read.size("num_experts_per_tok")
    if top_k > experts:
        read.mismatch(f"num_experts_per_tok {top_k} is more than {experts} experts")
    shared = read.stated(keys.shared) if keys.shared else 0
    oai, grouped = family == "gpt_oss", family in ("deepseek_v3", "kimi_k2")
    groups = {name: read.stated(name) if grouped else read.size(name, 0, least=0) for name in ("n_group", "topk_group")}
    return Moe(
        layers=held,
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        shared=inner * shared if keys.first_dense else shared,
        groups=groups["n_group"] if keys.first_dense else 0,
        top_groups=groups["topk_group"] if keys.first_dense else 0,
        bias=oai,
        renormalized=read.config.get("norm_topk_prob", kind not in _SHARES_AS_THEY_ARE) is not False,
        activation="swiglu_oai" if oai else "swiglu",
        keys=keys,
    )


def _mla(family: str, read: _Reader) -> Mla | None:
    if family not in MOE or not MOE[family].mla:
        return None
    return Mla(
        q_rank=read.stated("q_lora_rank"),
        kv_rank=read.size("kv_lora_rank"),
        nope=read.size("qk_nope_head_dim"),
        rope=read.size("qk_rope_head_dim"),
        value=read.size("v_head_dim"),
    )


def language_model(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The `text_config` of a model with several towers; None where the config itself is the language model's."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and "hidden_size" not in config else None


def _unknown(outer: str, inner: str, *, towers: bool) -> str:
    """What is wrong with the model types of a config that cannot be planned."""
    if inner:
        where = " of its text_config" if towers and inner != outer else ""
        return f"model_type {shown(repr(inner), _SHOWN)}{where} is not one that can be planned"
    if outer and towers:
        named = shown(repr(outer), _SHOWN)
        return f"model_type {named} is not one that can be planned (its text_config names none)"
    return "model_type is missing"


def read_model_config(name: str, config: Mapping[str, object], problems: Problems) -> ModelConfig:
    """Read the sizes of one model; what is missing or wrong is added to `problems`.

    Of a model with several towers only the language model is read, and the rest is named as left out.
    """
    outer = str(config.get("model_type") or "")
    left = tuple(sorted(key.removesuffix("_config") for key in config if key in ("vision_config", "audio_config")))
    text = language_model(config)
    if text is not None:
        config = {"torch_dtype": config.get("torch_dtype") or config.get("dtype"), **text}
        kind = str(text.get("model_type") or TEXT_TYPE.get(outer) or (outer if outer in KNOWN else ""))
    else:
        kind = TEXT_TYPE.get(outer, outer) if left else outer
        left = left if outer in TEXT_TYPE else ()
    family = SAME_LAYERS.get(kind, kind)
    if kind not in KNOWN:  # the other keys do not say what its layers are
        problems.add(
            f"config.json: {_unknown(outer, kind, towers=text is not None)}",
            f"known: {', '.join(sorted(KNOWN))}; a server's start needs no plan: `pipeline build MODEL --server vllm`",
        )
        return ModelConfig(name, family, DTYPES[0], *(1,) * 7)
    sizes = _CLASS_SIZES.get(kind, ()) if text is not None else ()
    defaults = {field_name: size for field_name, size in zip(_NAMES, sizes, strict=False) if size}
    read = _Reader(config, defaults, problems)
    layers = read.size("num_hidden_layers", most=MOST_LAYERS)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", default=heads)
    if heads % kv_heads and not (family in MOE and MOE[family].mla):
        read.mismatch(f"num_attention_heads ({heads}) must be divisible by num_key_value_heads ({kv_heads})")
    return ModelConfig(
        name=name,
        family=family,
        dtype=_dtype(config, problems),
        layers=layers,
        hidden=hidden,
        intermediate=read.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.size("head_dim", default=_HEAD_DIM.get(family, max(1, hidden // heads))),
        vocab=read.size("vocab_size"),
        moe=_moe(kind, family, read, layers),
        mla=_mla(family, read),
        drafts=read.size("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS),
        parts_left_out=left,
        assumed=tuple(read.assumed),
    )
