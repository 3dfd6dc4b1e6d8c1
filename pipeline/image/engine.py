"""An engine as the thing that tunes: found in the base image, and shut in for its start in the finished one."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

from pipeline.contract.errors import UsageError
from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import EngineRun, Plan

from .contexts import FIXED_TIME
from .facts import BaseFacts

# Below the entry point, as at run time: it offers the engine its copy.
ENTRY = "/opt/pipeline/bin/pipeline-run"


class EngineMissing(UsageError):
    """ENGINE= names an engine that the base image does not have."""


def with_engine_version(plan: Plan, facts: BaseFacts, base: str) -> Plan:
    """The plan with the version of its engine in the base; one without an engine as it is. Raises `EngineMissing`."""
    if plan.engine is None:
        return plan
    version = facts.packages.get(plan.engine.name, "")
    if not version or not facts.complete:
        raise EngineMissing(
            f"{base} has no {plan.engine.name} with torch and FlashInfer in it",
            hint="BASE_IMAGE=vllm/vllm-openai:<version> or lmsysorg/sglang:<version>: the image that will serve",
        )
    return replace(plan, engine=replace(plan.engine, version=version))


def replay_command(manifest: Manifest, max_wait: float) -> list[str]:
    """What replays a key in a container: the ops of its plan, or the start of the engine that made it."""
    if manifest.plan.engine is None:
        return ["python3", "-m", "pipeline.tune.replay", "--key", manifest.key]
    words = [ENTRY, "python3", "-m", "pipeline.tune.engines.again", "--key", manifest.key]
    return [*words, "--max-wait", str(max(1.0, max_wait - 5))]


def config_archive(engine: EngineRun) -> bytes:
    """The model's config files as a tar stream, readable by anyone: what is mounted at its path at run time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in sorted(engine.config.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(text.encode()), 0o644, FIXED_TIME
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()
