"""GPUs by the names that people know, and the architectures that FlashInfer compiles for."""

from __future__ import annotations

import re

from pipeline.contract.text import closest

HOPPER = 90
TRTLLM_GEN = (100, 103)  # compute capabilities, times ten, that the trtllm-gen kernels run on
BLACKWELL = (100, 103, 110, 120, 121)
HOPPER_ON = (HOPPER, *BLACKWELL)
KNOWN_SM = (80, 86, 87, 89, *HOPPER_ON)

# Compute capabilities by NVIDIA's own list (developer.nvidia.com/cuda-gpus)
GPUS = {
    "a100": 80, "a800": 80, "a30": 80, "a10": 86, "a10g": 86, "a16": 86, "a2": 86, "a40": 86, "rtx-a6000": 86,
    "rtx-a5000": 86, "rtx-a4000": 86, "rtx-3090": 86, "rtx-3080": 86, "jetson-orin": 87, "l4": 89, "l40": 89,
    "l40s": 89, "rtx-6000-ada": 89, "rtx-4090": 89, "rtx-4080": 89, "h20": 90, "h100": 90, "h200": 90, "h800": 90,
    "gh200": 90, "b100": 100, "b200": 100, "gb200": 100, "b300": 103, "gb300": 103, "jetson-thor": 110,
    "rtx-pro-6000": 120, "rtx-pro-5000": 120, "rtx-pro-4500": 120, "rtx-5090": 120, "rtx-5080": 120, "gb10": 121,
    "dgx-spark": 121,
}  # fmt: skip


def arch_name(sm: int) -> str:
    """FlashInfer's name of a compute capability: from 9.0 on it compiles for one architecture and adds a letter.

    From its compilation_context.py.
    """
    return f"{sm}{'' if sm < HOPPER else 'f' if sm == 120 else 'a'}"


def find_arch(text: str) -> str:
    """FlashInfer's name of a GPU architecture or GPU: `9.0a`, `sm_90a`, `90` and `h200` are all `90a`.

    Empty where there is no such GPU.
    """
    folded = text.strip().lower()
    if found := re.fullmatch(r"(?:sm_?|compute_?)?(\d{1,2})\.?(\d)([af]?)", folded, re.ASCII):
        sm = int(found[1] + found[2])
        named = f"{sm}{found[3]}" if found[3] else arch_name(sm)
        return named if sm in KNOWN_SM else ""
    wanted = _plain(folded)
    return next((arch_name(sm) for name, sm in GPUS.items() if _plain(name) == wanted), "")


def _plain(name: str) -> str:
    """A GPU's name without vendor, form factor, memory size and marks: `NVIDIA H100 80GB HBM3` is `h100`."""
    name = re.sub(
        r"\b(nvidia|geforce|sxm\d?|pcie|nvl\d*|hbm\w*|\d+gb|blackwell|server|workstation|edition)\b", "", name
    )
    return re.sub(r"[^a-z0-9]", "", name)


def arch_choices(text: str = "") -> str:
    """The architectures with the GPUs of each, those first that `text` may have meant."""
    near = closest(_plain(text.lower()), map(_plain, GPUS))
    meant = next((name for name in GPUS if _plain(name) == near), "")
    listed = "; ".join(
        f"{arch_name(sm)}: {', '.join(name for name, its in GPUS.items() if its == sm)}" for sm in KNOWN_SM
    )
    return f"{f'did you mean {meant} ({arch_name(GPUS[meant])})? ' if meant else ''}known: {listed}"
