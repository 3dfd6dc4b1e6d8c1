"""What /proc/cpuinfo says of a processor: the one reader of it, on the host and in the image.

Arm names no model there, only numbers: `CPU implementer 0x41, CPU part 0xd0c, CPU variant 0x3`.
"""

# A start of a container reads this: no pathlib, no typing.
from __future__ import annotations

CPUINFO = "/proc/cpuinfo"


def parse_cpuinfo(text: str) -> dict[str, str]:
    """`model` and `flags` (sha256 of the sorted flags, one space between) of the first processor.

    What the text lacks is left out.
    """
    import re
    from hashlib import sha256

    first = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text.partition("\n\n")[0], re.MULTILINE))
    arm = [f"{name} {first[name]}" for name in ("CPU implementer", "CPU part", "CPU variant") if name in first]
    model, flags = first.get("model name") or ", ".join(arm), first.get("flags") or first.get("Features")
    found = {"model": model} if model else {}
    if flags:
        found["flags"] = sha256(" ".join(sorted(set(flags.split()))).encode()).hexdigest()
    return found


def count_processors(text: str) -> int:
    """How many logical processors the text lists."""
    return sum(line.startswith("processor") for line in text.splitlines())
