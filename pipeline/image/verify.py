"""The step `verify`: what an image is, and what fresh containers of it show. The verdict is a file, never a label."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.digest import image_identity, sha256_json
from pipeline.contract.errors import PipelineError, UsageError
from pipeline.contract.files import write_json
from pipeline.contract.verdict import Level, Verdict, VerifyFailed

from .base import find
from .gpus import Gpus, offered
from .names import PRODUCER
from .probe import probe
from .producer import Job, Producer, Proof
from .replay import Here, prove
from .servers import prover
from .session import Session

if TYPE_CHECKING:
    from docker import DockerClient

    from .resolve import Inputs


def identity_of(client: DockerClient, image: str) -> tuple[str, tuple[str, ...]]:
    """An image's identity and its diff ids, lowest first; raise `UsageError` where the engine has no such image."""
    from docker.errors import ImageNotFound

    try:
        attrs = client.images.get(image).attrs
    except ImageNotFound as error:
        raise UsageError(
            f"there is no image {image} in the Docker Engine", hint="`docker images` lists what there is"
        ) from error
    layers = tuple(str(layer) for layer in attrs["RootFS"]["Layers"])
    return image_identity(layers, attrs.get("Config") or {}), layers


def verdict_of(client: DockerClient, image: str, proof: Proof) -> Verdict:
    """The verdict on an image that this proof is about."""
    identity, layers = identity_of(client, image)
    return Verdict(
        identity=identity,
        cache_diff_id=layers[-1],
        manifest_sha256=",".join(proof.manifests),
        key=",".join(proof.keys or proof.proven),
        device=proof.device,
        level=proof.level,
        result="fail" if proof.findings else "pass",
        checks=proof.checks,
        findings=proof.findings,
        replayed=() if proof.level == "replay" else proof.proven,
        starts=proof.starts,
    )


def recall(session: Session, image: str, here: Here) -> Verdict | None:
    """The passing verdict of full level that this very image got earlier on this very device."""
    with contextlib.suppress(OSError, ValueError, PipelineError):
        file = _file(session, image, here)
        verdict = Verdict.from_json(json.loads(file.read_text(encoding="utf-8")))
        if verdict.result == "pass" and verdict.level == "replay":
            return verdict
    return None


def remember(session: Session, image: str, here: Here, verdict: Verdict) -> None:
    """Write a verdict down."""
    write_json(_file(session, image, here), verdict.to_json())


def _file(session: Session, image: str, here: Here) -> Path:
    """By the image and where it was tried: a verdict says nothing of another host."""
    device = {"engine": session.engine.name, "gpus": here.gpus.facts(), "processor": dict(here.processor)}
    identity, _ = identity_of(session.client, image)
    return session.home / "verdicts" / f"{sha256_json([identity, device])[:32]}.json"


def verify(inputs: Inputs, image: str, session: Session, *, timeout: float, hint: str) -> Verdict:
    """Prove an image that was baked a moment ago, or recall what this very image showed on this device before.

    Raises `VerifyFailed` with `hint` where it must not be used.
    """
    verdict = recall(session, image, inputs.here)
    if verdict is None:
        verdict = _proved(session, image, inputs.producer, inputs.here.gpus, timeout)
        remember(session, image, inputs.here, verdict)
    if verdict.result != "pass":
        raise VerifyFailed(verdict, hint)
    return verdict


def verify_image(session: Session, image: str, *, level: Level, timeout: float) -> Verdict:
    """Verify an image of which nothing is known but its labels: what `pipeline verify` does."""
    identity_of(session.client, image)
    labels = session.client.images.get(image).labels
    found = find(session.client, image, "given")
    assert found is not None, "it was found a moment ago"
    facts, gpus = probe(session, found, offered(session.engine))
    here = Here(gpus, facts.processor, facts.machine)
    name = str(labels.get(PRODUCER, "tune"))
    if name == "tune":
        return verdict_of(session.client, image, prove(session.client, image, here, level=level, timeout=timeout))
    return _proved(session, image, prover(session.client, image), gpus, timeout)


def _proved(session: Session, image: str, producer: Producer, gpus: Gpus, timeout: float) -> Verdict:
    """What fresh containers of an image say by its producer; `timeout` in seconds."""
    with tempfile.TemporaryDirectory(prefix="prove-") as scratch:
        job = Job(session.client, session.engine, image, gpus, session.log, Path(scratch), timeout, timeout)
        return verdict_of(session.client, image, producer.prove(image, job))
