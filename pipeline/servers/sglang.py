"""SGLang, by reading the package of 0.5.23: no start of it was made.

Its autotune file is named by a short hash of what is served, one file a rank:

    $SGLANG_CACHE_DIR/flashinfer/autotune/<flashinfer-version>/sm<major><minor>/<16 digits>/rank_tp{t}_pp{p}_dp{d}.json
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .adapter import ADDRESS, NAMELESS, PROMPT, REPLACED, Adapter, Event, Phase, Ways, below
from .words import Words, without

_FACTS = """
import importlib.metadata as m, json
out = {"versions": {}, "aot": "", "hashed": []}
for n in ("sglang", "torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "transformers"):
    try: out["versions"][n] = m.version(n)
    except m.PackageNotFoundError: pass
try:
    import flashinfer.jit.env as e
    out["aot"] = str(e.FLASHINFER_AOT_DIR)
except Exception: pass
try:
    import torch
    out["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
except Exception: pass
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Served:
    """What the short hash covers, each part as `str()` spells it in SGLang."""

    model_path: str
    dtype: str
    quantization: str
    moe_backend: str
    tp: int
    pp: int
    attention_dp: int
    moe_ep: int
    config_class: str
    skip_ops: tuple[str, ...] = ()
    draft_quantization: str | None = None  # for a draft model's worker only

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        parts: list[str] = [self.model_path, self.dtype, self.quantization, self.moe_backend]
        parts += [str(size) for size in (self.tp, self.pp, self.attention_dp, self.moe_ep)]
        parts += [self.config_class, "candidate_selection=v2_default", f"skip_ops={','.join(sorted(self.skip_ops))}"]
        if self.draft_quantization is not None:
            parts.append(f"draft_quant={self.draft_quantization}")
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


class _Sglang:
    name = "sglang"
    serve: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
    health = "health"
    known = r"0\.5(\..*)?"
    facts: tuple[str, ...] = ("python3", "-c", _FACTS)
    phases: Sequence[Phase] = (
        Phase("import", ends=r"server_args=|Init torch distributed begin"),
        Phase("load", ends=r"Load weight end"),
        Phase("memory", ends=r"Memory pool end"),
        Phase("capture", ends=r"Capture (cuda|device) graph end"),
    )
    events: Sequence[Event] = (
        Event("flashinfer-autotune", "hit", r"[Ll]oaded .*autotune"),
        Event("flashinfer-autotune", "made", r"[Rr]unning FlashInfer autotune|[Ss]aved .*autotune"),
    )

    def command(self, words: Words) -> tuple[str, ...]:
        """Its module with these words; how weights are loaded enters no hash (by its code)."""
        kept = without(words.arguments, REPLACED)
        return (*self.serve, *kept, *ADDRESS, "--load-format", "dummy", "--skip-tokenizer-init")

    def environment(self, root: str) -> dict[str, str]:
        """As 0.5.23 sets most of them itself, below SGLANG_CACHE_DIR."""
        places = {
            "SGLANG_CACHE_DIR": "sglang",
            "SGLANG_JIT_CACHE_DIR": "sglang/jit",
            "SGLANG_DG_CACHE_DIR": "sglang/deep_gemm",
            "SGLANG_CUTE_AOT_CACHE_DIR": "sglang/cute_aot",
            "TRITON_CACHE_DIR": "sglang/triton",
            "TORCHINDUCTOR_CACHE_DIR": "sglang/inductor",
            "CUDA_CACHE_PATH": "sglang/nv",
            "TILELANG_CACHE_DIR": "sglang/tilelang",
            "FLASHINFER_WORKSPACE_BASE": "sglang",
            "CUTE_DSL_CACHE_DIR": "cute_dsl",
            "TVM_FFI_CACHE_DIR": "tvm_ffi",
        }
        return {**below(root, places), **NAMELESS}

    def requests(self, words: Words) -> tuple[Ways, ...]:  # noqa: ARG002 - no name of the model is asked for
        """Token ids, since there is no tokenizer."""
        asked = (
            {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True},
            {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "ignore_eos": True},
        )
        return tuple((("generate", {"input_ids": list(PROMPT), "sampling_params": one}),) for one in asked)

    def token(self, words: Words) -> str:  # noqa: ARG002 - none is wanted
        """`--api-key` is left out of the start."""
        return ""

    def enters(self, variable: str, hashed: Sequence[str]) -> bool:
        """Its autotune hash holds no variable but what skips ops (by its code)."""
        return variable == "SGLANG_FLASHINFER_AUTOTUNE_SKIP_OPS" or variable in hashed

    def ignored(self) -> frozenset[str]:
        """Options that its hash leaves out (by its code)."""
        return frozenset(REPLACED) | {
            "served-model-name", "random-seed", "log-level", "tokenizer-path", "tokenizer-mode", "mem-fraction-static",
            "chat-template", "enable-metrics", "tool-call-parser", "reasoning-parser",
        }  # fmt: skip


ADAPTER: Adapter = _Sglang()
