"""Starts of a server's image, timed in turn: cold, warm, baked as root, baked as another user with a read-only root.

    python -m tests.gpu.server_starts BASE_IMAGE IMAGE OUT --model FOLDER [--rounds N] [--ways cold,warm] \
        [--env NAME=VALUE …] -- SERVER ARGUMENTS

BASE_IMAGE serves and has no caches; IMAGE is what `make image SERVER=vllm` made of it. FOLDER has config.json and is
mounted where the arguments name the model; weights are random. OUT/starts.json is written after each start. A start is
timed from `docker start` to the first answer of /health, and then asked three requests.

    cold    a new container of BASE_IMAGE
    warm    the container of the last cold start, started again
    root    a new container of IMAGE
    user    the same as 12345:12345, with a read-only root
    empty   the same with nothing at the root of the caches
    moved   a container of IMAGE whose caches lie elsewhere, as its variables say

Several GPUs: NVLink multicast can put a host's GPUs out of service, so that no server is started on more than one GPU
unless every variable of GUARD, and the option after it, is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.models.containers import Container

import docker
from pipeline.image.gpus import Gpus
from pipeline.servers import kinds
from pipeline.servers.adapters import Vllm
from pipeline.servers.words import Words

PORT = 18000
READY = 420.0  # seconds
GUARD = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}  # fmt: skip
GUARD_OPTION = '{"pass_config": {"fuse_allreduce_rms": false}}'
WAYS = ("cold", "warm", "root", "user", "empty", "moved")
ELSEWHERE = "/opt/moved"


def unguarded(words: Words) -> list[str]:
    """What is missing of the words that keep multicast away; nothing where one GPU serves."""
    if words.ranks == 1:
        return []
    missing = [f"{name}={value}" for name, value in GUARD.items() if words.environment.get(name) != value]
    given = words.options.get("compilation-config", "{}")
    fused = json.loads(given).get("pass_config", {}).get("fuse_allreduce_rms") if given.startswith("{") else None
    return missing + ([] if fused is False else [f"--compilation-config '{GUARD_OPTION}'"])


class Starts:
    """One server's arguments, its images, and what was measured."""

    def __init__(self, base: str, image: str, out: Path, model: Path, words: Words) -> None:
        self.client = docker.from_env(timeout=900)
        self.base, self.image, self.out, self.words = base, image, out, words
        info = self.client.info()
        self.gpus = Gpus("cdi") if info.get("DiscoveredDevices") else Gpus("runtime")
        if info.get("DefaultRuntime") == "nvidia":
            self.gpus = Gpus("default-runtime")
        self.model = model.resolve()
        self.kept: Container | None = None  # the container of the last cold start
        self.found: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def create(self, image: str, **options: Any) -> Container:
        """A container of `image` with the deployment's words, not started."""
        command = [*Vllm.serve, *self.words.arguments, "--host", "127.0.0.1", "--port", str(PORT),
                   "--load-format", "dummy", "--skip-tokenizer-init"]  # fmt: skip
        environment = {**self.words.environment, **options.pop("environment", {})}
        mount = {str(self.model): {"bind": self.words.model, "mode": "ro"}}
        return self.client.containers.create(
            image, command, entrypoint=[], network_mode="host", shm_size=8 << 30, environment=environment,
            volumes=mount, **self.gpus.options(), **options,
        )  # fmt: skip

    def once(self, way: str) -> None:
        """One start, timed, asked and stopped."""
        user: dict[str, Any] = {"user": "12345:12345", "read_only": True, "tmpfs": {"/tmp": "rw,exec,mode=1777"}}
        if way == "warm":
            if self.kept is None:
                return self.note(way, {"failed": "no cold start before it"})
            container = self.kept
        elif way == "cold":
            self.forget()
            container = self.kept = self.create(self.base, user="0:0")
        elif way == "root":
            container = self.create(self.image, user="0:0")
        elif way == "user":
            user["mounts"] = [docker.types.Mount(kinds.ROOT, None)]  # a nameless volume, filled from the image
            container = self.create(self.image, **user)
        elif way == "empty":
            user["tmpfs"] = {**user["tmpfs"], kinds.ROOT: "rw,exec,mode=1777"}
            container = self.create(self.image, **user)
        else:
            container = self.create(*self.moved(), user="0:0", environment=self.places())
        began = time.monotonic()
        container.start()
        told = self.until_ready(container, began)
        container.stop(timeout=30)
        (self.out / f"{len(self.found):02}-{way}.log").write_bytes(container.logs(tail=4000))
        if container is not self.kept:
            container.remove(v=True, force=True)
        return self.note(way, told)

    def until_ready(self, container: Container, began: float) -> dict[str, Any]:
        """Seconds from `began` to /health, and to the end of each of three requests."""
        while time.monotonic() - began < READY:
            if ask("health", None)[0] == 200:
                told: dict[str, Any] = {"ready": round(time.monotonic() - began, 1), "answers": []}
                for tries in Vllm().requests(self.words):
                    sent = time.monotonic()
                    answered = any(ask(path, body, timeout=120)[0] == 200 for path, body in tries)
                    told["answers"].append([answered, round(time.monotonic() - sent, 2)])
                return told
            container.reload()
            if container.status == "exited":
                return {"failed": f"exit {container.attrs['State']['ExitCode']}"}
            time.sleep(0.1)
        return {"failed": f"not ready within {READY:.0f} s"}

    def moved(self) -> tuple[str]:
        """An image whose caches were copied elsewhere and taken away."""
        words = ["sh", "-c", f"cp -a {kinds.ROOT} {ELSEWHERE} && rm -r {kinds.ROOT}"]
        container = self.client.containers.create(self.image, words, entrypoint=[], user="0:0")
        container.start()
        container.wait()
        container.commit("starts/moved", "1")
        container.remove()
        return ("starts/moved:1",)

    def places(self) -> dict[str, str]:
        """The image's variables that place caches, for the place that they were moved to."""
        lines = self.client.images.get(self.image).attrs["Config"]["Env"]
        pairs = (line.partition("=")[::2] for line in lines)
        return {name: value.replace(kinds.ROOT, ELSEWHERE) for name, value in pairs if value.startswith(kinds.ROOT)}

    def note(self, way: str, told: Mapping[str, Any]) -> None:
        """Write down one start."""
        self.found.append({"way": way, **told})
        (self.out / "starts.json").write_text(json.dumps(self.found, indent=1))
        print(f"[{time.strftime('%H:%M:%S')}] {json.dumps(self.found[-1])}", flush=True)

    def forget(self) -> None:
        """Remove the container of the last cold start."""
        if self.kept is not None:
            self.kept.remove(v=True, force=True)
        self.kept = None


def ask(path: str, body: Any, timeout: float = 2.0) -> tuple[int, str]:
    """Status and text of one request; status 0 where there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read(500).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def main(given: Sequence[str] | None = None) -> int:
    """All ways in turn, in rounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.server_starts", epilog="-- SERVER ARGUMENTS")
    parser.add_argument("base", metavar="BASE_IMAGE")
    parser.add_argument("image", metavar="IMAGE")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="has config.json")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    parser.add_argument("--ways", default="cold,warm,root,user", help=f"of {','.join(WAYS)}")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    given = sys.argv[1:] if given is None else list(given)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    ways = options.ways.split(",")
    if wrong := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: there is no {wrong[0]!r}; choose of {','.join(WAYS)}")
    words = Words("vllm", tuple(given[end + 1 :]), dict(line.partition("=")[::2] for line in options.env))
    if missing := unguarded(words):
        parser.error(f"more than one GPU, and NVLink multicast is not kept away: missing {', '.join(missing)}")
    starts = Starts(options.base, options.image, options.out, options.model, words)
    for _ in range(options.rounds):
        for way in ways:
            starts.once(way)
    starts.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
