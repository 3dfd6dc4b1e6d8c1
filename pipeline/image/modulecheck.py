"""Whether the compiled modules in an image are those that the ranks loaded when they tuned."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.cache.archive import chunked
from pipeline.contract.manifest import Manifest, Module

from .contain import Sandbox, created

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

_BLOCK = 1 << 20


def module_findings(
    client: DockerClient, image: str, manifests: Sequence[Manifest], baked: Sequence[str]
) -> Iterator[str]:
    """Findings on the modules that the image's label names: each must lie there with a manifest's size and sha256.

    A manifest may list more: modules that came compiled with FlashInfer, or that were left out with BAKE_JIT=0.
    """
    listed = [module for manifest in manifests for module in manifest.modules if module.name in baked and module.path]
    for name in sorted(set(baked) - {module.name for module in listed}):
        yield f"the module {name} is in the image, and in no manifest"
    if not listed:
        return
    with created(client, image, ["true"], Sandbox()) as container:
        for module in dict.fromkeys(listed):
            said = _wrong(container, module)
            if said:
                yield f"the module {module.name} {said}"


def _wrong(container: Container, module: Module) -> str:
    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive(module.path)
    except NotFound:
        return f"is not at {module.path}"
    size, digest = _read(chunks, module.size)
    if size != module.size:
        return f"has {size} bytes, the manifest says {module.size}"
    return "" if digest == module.sha256 else "does not have the sha256 that the manifest gives"


def _read(chunks: Iterable[bytes], most: int) -> tuple[int, str]:
    """Size and sha256 of the one file of a tar stream; a larger one than `most` is not read."""
    with tarfile.open(fileobj=chunked(chunks), mode="r|") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is None or member.size > most:
                return member.size, ""
            digest = hashlib.sha256()
            while block := stream.read(_BLOCK):
                digest.update(block)
            return member.size, digest.hexdigest()
    return 0, ""
