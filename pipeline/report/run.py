"""How to run an image, with Docker and in Kubernetes."""

from __future__ import annotations

import shlex
from typing import Any

from .facts import Facts

_ENGINE = "unix:///var/run/docker.sock"


def docker(facts: Facts, host: str = "") -> str:
    """A command line; `host` is the engine's address, named where it is not Docker's usual one."""
    other = f"DOCKER_HOST={host} " if host not in ("", _ENGINE) else ""
    return other + shlex.join(["docker", "run", "--rm", *facts.options, facts.image, *facts.words])


def kubernetes(facts: Facts) -> str:
    """The part of a pod's `spec` that matters, as YAML. The words are `args`: the image's ENTRYPOINT stays."""
    import yaml

    server: dict[str, Any] = {"name": "server", "image": facts.image, "args": list(facts.words)}
    spec: dict[str, Any] = {"containers": [server]}
    if "--gpus" in facts.options:
        server["resources"] = {"limits": {"nvidia.com/gpu": facts.ranks}}
    if "-v" in facts.options:
        mounted = facts.options[facts.options.index("-v") + 1].split(":")[1]
        server["volumeMounts"] = [{"name": "model", "mountPath": mounted, "readOnly": True}]
        spec["volumes"] = [{"name": "model", "persistentVolumeClaim": {"claimName": "your-model"}}]
    text: str = yaml.safe_dump(spec, sort_keys=False, width=100)
    return text
