"""What an engine was told when it tuned, beside what it is told now.

Its own hash covers its configuration, which its words decide. We cannot compute that hash without the engine, so that
every option counts as one that may enter it, but those that are known to say nothing about what is computed.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Where the engine listens, what it calls itself, what it logs, how it reads prompts: not in vLLM's ModelConfig,
# ParallelConfig … hashes, nor among the parts of SGLang's key.
_OUTSIDE_NAMES = """
host port uds api-key served-model-name load-format tokenizer tokenizer-path tokenizer-mode skip-tokenizer-init
seed random-seed chat-template tool-call-parser enable-auto-tool-choice reasoning-parser root-path
uvicorn-log-level log-level log-level-http disable-log-requests enable-log-requests disable-log-stats
log-requests log-requests-level max-log-len enable-metrics disable-access-log-for-endpoints
disable-uvicorn-access-log ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs allowed-origins
allowed-methods allowed-headers allow-credentials middleware api-server-count download-dir
"""
_OUTSIDE = frozenset(_OUTSIDE_NAMES.split())
_SERVE = {"vllm": (["serve"],), "sglang": (["sglang.launch_server"], ["serve"])}
_MODEL = frozenset({"model", "model-path"})


def differing(layout: dict[str, Any], command: list[str]) -> tuple[str, str]:
    """What may keep the engine from finding its cache, and a remark where its words cannot be told; else both empty."""
    now = after_serve(str(layout.get("engine", "")), command)
    told = layout.get("arguments")
    if now is None or not isinstance(told, list):
        return "", f"not compared: what {layout.get('engine')} is told is not in the command"
    was = options([str(word) for word in told])
    here = options(now)
    names = sorted(name for name in {*was, *here} - _OUTSIDE if was.get(name) != here.get(name))
    if not names:
        return "", ""
    spelled = ", ".join("the model" if name in _MODEL else f"--{name}" for name in names[:6])
    return f"it was tuned with other arguments ({spelled})", ""


def after_serve(engine: str, command: list[str]) -> list[str] | None:
    """The words after an engine's serve command; None where the command is another."""
    for serve in _SERVE.get(engine, ()):
        for at in range(1, min(len(command), 6)):
            if command[at : at + len(serve)] == serve:
                return command[at + len(serve) :]
    return None


def options(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Options by name, dashes for underscores, each with its values in order; the first bare word is the model."""
    found: dict[str, tuple[str, ...]] = {}
    name = "model"
    for word in words:
        if word.startswith("-") and not _number(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = _SAME.get(name.replace("_", "-"), name.replace("_", "-"))
            found[name] = (value,) if equals else ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found


_SAME = {
    "tp": "tensor-parallel-size",
    "tp-size": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dp-size": "data-parallel-size",
    "ep": "expert-parallel-size",
    "ep-size": "expert-parallel-size",
    "model-path": "model",
    "q": "quantization",
}


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
