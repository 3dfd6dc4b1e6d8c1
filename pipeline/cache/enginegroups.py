"""Would an engine use what lies in a directory of its own? Its files as one answer, by its rule and FlashInfer's."""

from __future__ import annotations

from pathlib import Path

from . import finding
from .enginefiles import STORE_NOTE
from .environment import Environment
from .explain import Answer, answer_for
from .finding import Finding
from .judge import judge
from .layouts import layout_of
from .layouts.collected import collect
from .layouts.group import Group
from .read import CacheFile

_ENGINES = ("vllm", "sglang")


def engine_groups(root: Path) -> tuple[Group, ...]:
    """Groups of engines' files below a directory. A shared file counts only where vLLM's hash names its directory."""
    found = [group for name in _ENGINES for group in layout_of(name).gather(str(root))]
    return tuple(
        one for one in found if one.parts.get("kind") != "shared" or len(one.parts["digest"]) == 64 or one.files[1:]
    )


def explain_group(group: Group, environment: Environment | None) -> Answer:
    """One answer for the files of one start of an engine: why it would refuse them, and why FlashInfer would."""
    one = collect(group, 1)
    findings = tuple(Finding("", said) for said in layout_of(group.layout).check(group))
    if not one.entries and not findings:
        findings = (Finding("", "has no entries", "tune again: nothing was tuned", finding.NO_ENTRIES),)
    file = CacheFile(one.metadata, one.entries, {}, findings)
    judgement = judge(file, environment.record if environment is not None else None)
    name = f"{group.layout}: {group.directory}"
    notes = (f"{len(group.files)} files of one start of {group.layout}",)
    if group.parts.get("kind") == "store":
        notes = (STORE_NOTE,)
    return answer_for(name, judgement, file, environment, notes)
