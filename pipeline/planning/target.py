"""What a plan is made for: a device, its architecture, and the backends that may compete there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.flashinfer.gpus import TRTLLM_GEN, arch_choices, find_arch
from pipeline.flashinfer.ops import BACKENDS

from .problems import Problems

# What competes unless others are asked for. cuBLAS and cuBLASLt answer both a caller that names them and one that
# says backend="auto", and need nothing beside CUDA. Of the block-scaled products the one backend that vLLM 0.28 and
# 0.33 and SGLang 0.5.23 name: an entry holds its winner's backend, so that any other winner would be a miss.
_USUAL: dict[str, tuple[str, ...]] = {"mm_bf16": ("cublaslt", "cutlass"), "bmm_fp8": ("cublas", "cutlass")}
_ALONE = ("mm_fp4", "mm_mxfp8")


def usual_backends(adapter: str, sm: int) -> tuple[str, ...]:
    """The backends that compete in an adapter where none are asked for, those first that servers ask for."""
    if adapter in _ALONE:
        return ("cute-dsl",) if sm in TRTLLM_GEN else ("cutlass",)
    return tuple(name for name in _USUAL.get(adapter, ()) if sm in BACKENDS[adapter][name])


@dataclass(frozen=True)
class Target:
    """`device` is `cpu` or `cuda`, `arch` FlashInfer's name for it (`90a`, `cpu-x86_64`)."""

    device: str
    arch: str

    @property
    def sm(self) -> int:
        """The compute capability times ten; 0 for a processor."""
        found = re.match(r"(\d+)[af]?$", self.arch)
        return int(found[1]) if found and self.device == "cuda" else 0


def gpu_arch(text: str, problems: Problems) -> str:
    """FlashInfer's spelling of a GPU architecture or of a GPU: 9.0a, sm_90a, 90 and h200 are all 90a."""
    found = find_arch(text)
    if not found:
        problems.add(f"--arch {text} is no GPU or GPU architecture that can be planned for", arch_choices(text))
    return found or text


def backends(adapter: str, sm: int, asked: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The backends that compete in one op; empty where the adapter has no choice of them."""
    return tuple(asked[adapter]) if adapter in asked else usual_backends(adapter, sm)


def check_backends(asked: Mapping[str, Sequence[str]], target: Target, problems: Problems, *, cudnn_bf16: str) -> None:
    """Add to `problems` what was asked for and does not exist; `cudnn_bf16` is the reason against that one, if any."""
    for adapter, names in asked.items():
        if adapter not in BACKENDS:
            problems.add(f"--backends {adapter}: no choice of backends there", f"known: {', '.join(BACKENDS)}")
            continue
        can = [name for name, sms in BACKENDS[adapter].items() if target.sm in sms]
        for name in names:
            if name not in can:
                problems.add(
                    f"--backends {adapter}={name} does not exist on {target.arch}", f"there: {', '.join(can) or 'none'}"
                )
            elif name == "cute-dsl" and len(names) > 1:
                problems.add(
                    f"--backends {adapter}={'+'.join(names)}: cute-dsl competes with no other",
                    'FlashInfer takes it only where it is named alone, backend="auto" never does',
                )
            elif adapter == "mm_bf16" and name == "cudnn" and cudnn_bf16:
                problems.add(f"--backends mm_bf16=cudnn: {cudnn_bf16}", "take cublaslt")
