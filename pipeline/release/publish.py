"""One verified image into a registry: push by digest, read back, attach and sign, and the tags last.

Nothing that has a tag lacks its attestations, whenever this is interrupted. What an earlier run of this host pushed is
noted in its journal and taken from there; bytes that the registry has are not sent again.

    <cache home>/releases/<digest>.json    the journal: {"digest": index that was pushed}
    <cache home>/releases/<digest>.lock    held while a run of this host works on these inputs
    <cache home>/releases/push.lock        held while blobs are sent
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log as talk
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import PublishError
from pipeline.contract.files import scratch, write_json
from pipeline.contract.verdict import Verdict
from pipeline.daemon.lock import locked
from pipeline.image.contexts import FIXED_TIME
from pipeline.registry.client import Registry, parallel_map
from pipeline.registry.descriptors import INDEX, Descriptor, Manifest, json_object
from pipeline.registry.errors import InvalidResponse, NotFound
from pipeline.registry.reference import Reference

from . import attachments, cosign
from .images import ATTESTATION_KIND, ImageIndex, read_image
from .tags import inputs_tag

if TYPE_CHECKING:
    from .building import BuiltImage

_AT_ONCE = 4  # blobs that are sent at the same time
_LONGEST = 86_400.0  # seconds that another run of the same cell may take; when it ends, its lock is gone


@dataclass(frozen=True)
class Published:
    """The digest of the index that was published, and whether anything had to be pushed, attached or signed."""

    digest: str
    new: bool


@contextlib.contextmanager
def exports(home: Path) -> Iterator[Path]:
    """An empty OCI layout for one run; those of runs that were killed, whose locks are gone, are removed."""
    folder = home / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    with scratch(folder, "run-") as made:
        yield made


@dataclass(frozen=True)
class Publisher:
    """Where images go: `place` is registry and repository; `layout` receives them from BuildKit."""

    registry: Registry
    place: Reference
    home: Path
    layout: Path
    signer: cosign.Signer | None = None
    compression: str = ""

    def publish(
        self, image: BuiltImage, verdicts: tuple[Verdict, ...], inputs: str, annotations: Mapping[str, str], tag: str
    ) -> Published:
        """Bring an image to its tags: that of its `inputs`, and last `tag`, which is never moved (empty: none).

        Raises `PublishError` before anything is pushed where the tag stands for another image.
        """
        name = self.place.tagged(tag) if tag else None
        found = self._journaled(inputs, image.config_digest)
        if name is not None:
            found = image_under_tag(self.registry, name, found or image.config_digest, self.signer) or found
        pushed = found is None
        index = found or self._push(image, inputs, annotations, tag)
        attached = self._attach(image, index, verdicts)
        if name is not None:  # another host may have released the same meanwhile
            index = image_under_tag(self.registry, name, index, self.signer) or index
        move_tag(self.registry, self.place.tagged(inputs_tag(inputs)), index)
        if name is not None:
            index, _ = give_tag(self.registry, name, index, self.signer)
        return Published(index.digest, pushed or attached)

    def exclusive(self, inputs: str) -> AbstractContextManager[None]:
        """Be the only run of this host that releases these inputs; wait for another one."""
        return locked(self._journal(inputs).with_suffix(".lock"), "a cell", wait=_LONGEST, error=PublishError)

    def _journal(self, inputs: str) -> Path:
        return self.home / "releases" / f"{sha256_json([self.place.name, inputs])[:32]}.json"

    def _journaled(self, inputs: str, config: str) -> ImageIndex | None:
        """The image that an earlier run of this host pushed, where the registry has it still."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, NotFound, InvalidResponse):
            digest = str(json.loads(self._journal(inputs).read_text(encoding="utf-8"))["digest"])
            found = read_image(self.registry, self.place.repository, self.place.at(digest).digest)
            if found.images[0].config_digest == config:
                talk.note(f"pushed by an earlier run: {digest}")
                return found
        return None

    def _push(self, image: BuiltImage, inputs: str, annotations: Mapping[str, str], tag: str) -> ImageIndex:
        """Export and push under digests alone; what is there already does not travel."""
        with talk.step("export the image with its provenance"):
            digest = image.export(
                self.layout, f"{self.place.name}{f':{tag}' if tag else ''}", annotations, self.compression
            )
        try:
            top = self._exported(digest)
            parts = {one.digest: self._exported(one.digest) for one in top.entries("manifests")}
            images = [one for one in top.entries("manifests") if not one.annotations.get(ATTESTATION_KIND)]
            configs = [Descriptor.from_json(parts[one.digest].json().get("config")).digest for one in images]
        except (InvalidResponse, OSError) as error:
            raise PublishError(f"what BuildKit exported cannot be read: {error}") from error
        if configs != [image.config_digest]:
            raise PublishError(
                "what BuildKit exported is not the image that was verified",
                hint="something that the image is made of has changed meanwhile: run it again",
            )
        with talk.step(f"push to {self.place.name}"):
            sent = self._upload([*parts.values(), top])
        talk.note(f"{sent:,} bytes of blobs had to be pushed")
        found = self._read_back(digest, image.config_digest, annotations)
        write_json(self._journal(inputs), {"digest": digest})
        return found

    def _blob(self, digest: str) -> Path:
        """Where a blob or manifest lies in the layout."""
        return self.layout / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def _exported(self, digest: str) -> Manifest:
        body = self._blob(digest).read_bytes()
        return Manifest(body, str(json_object(body, digest).get("mediaType", INDEX)), digest)

    def _upload(self, manifests: list[Manifest]) -> int:
        """Push what the registry lacks; return how many bytes of blobs that were. What names others comes last."""
        repository = self.place.repository
        blobs: dict[str, Descriptor] = {}
        for manifest in manifests[:-1]:
            named = [*manifest.entries("layers"), Descriptor.from_json(manifest.json().get("config"))]
            blobs |= {one.digest: one for one in named}
        every = list(blobs.values())
        there = parallel_map(lambda one: self.registry.has_blob(repository, one.digest), every, _AT_ONCE)
        missing = [one for one, has in zip(every, there, strict=True) if not has]
        parallel_map(
            lambda one: self.registry.put_blob(repository, self._blob(one.digest), one.media_type), missing, _AT_ONCE
        )
        for manifest in manifests:
            if self.registry.resolve(repository, manifest.digest) is None:
                self.registry.put_manifest(repository, manifest)
        return sum(one.size for one in missing)

    def _read_back(self, digest: str, config: str, annotations: Mapping[str, str]) -> ImageIndex:
        """What the registry has; raise `PublishError` unless it is this config, with all annotations and provenance."""
        found = read_image(self.registry, self.place.repository, digest)
        image = found.images[0]
        wrong = [] if image.config_digest == config else [f"its config is {image.config_digest[:19]}…"]
        for what, manifest in (("index", found.top), ("manifest", image.manifest)):
            there = manifest.annotations()
            wrong += [f"the {what} came back without {n}" for n, text in annotations.items() if there.get(n) != text]
        if not image.attestations:
            wrong.append("it came back without provenance")
        if wrong:
            raise PublishError(
                f"{digest[:19]}… is not what was pushed: {wrong[0]}",
                details=wrong,
                hint="the Docker Engine needs the containerd image store: `pipeline daemon up --store containerd`",
            )
        return found

    def _attach(self, image: BuiltImage, index: ImageIndex, verdicts: tuple[Verdict, ...]) -> bool:
        """Attach to the image's manifest what is not there yet, and sign; return whether anything was."""
        from . import sbom  # its library is slow to import, and looking for cells needs none

        target = index.images[0]
        with talk.step("list what is installed"):
            packages = sbom.installed(image.run, image.wheels)
        created = datetime.fromtimestamp(FIXED_TIME, UTC)  # as all its files have it
        manifest = attachments.autotune if image.producer == "tune" else attachments.server
        files = [
            *map(manifest, image.manifests),
            *map(attachments.verdict, verdicts),
            attachments.sbom(sbom.make(packages, name=self.place.name, digest=target.digest, created=created)),
        ]
        with talk.step(f"attach {', '.join(dict.fromkeys(one.title for one in files))} to {target.digest[:19]}…"):
            made, new = attachments.attach(self.registry, self.place.repository, target.manifest.descriptor(), files)
        if self.signer is not None:
            with talk.step(f"sign {self.place.name}@{index.digest[:19]}…"):
                alone = [digest for one, digest in zip(files, made, strict=True) if not one.bound]
                for digest in (*alone, index.digest):
                    new |= cosign.sign(self.registry, self.place.at(digest), self.signer, log=image.log)
        return new


def image_under_tag(
    registry: Registry, name: Reference, wanted: ImageIndex | str, signer: cosign.Signer | None
) -> ImageIndex | None:
    """What has the tag `name`, which is never moved: None where nothing has, else the same image as `wanted`.

    `wanted` is an image, or the config digest of one that is not in the registry yet. Raises `PublishError` when the
    tag stands for any other. Where two hosts released the same image, the indexes differ in their provenance alone. A
    key vouches for nothing that somebody else put there: with one, it must be `wanted` itself or have its signature.
    """
    digest = registry.resolve(name.repository, name.tag)
    if digest is None:
        return None
    if isinstance(wanted, ImageIndex) and wanted.digest == digest:
        return wanted
    configs = [wanted] if isinstance(wanted, str) else [one.config_digest for one in wanted.images]
    found = read_image(registry, name.repository, digest)
    whole = all(one.attestations for one in found.images)
    if not whole or [one.config_digest for one in found.images] != configs:
        raise PublishError(
            f"{name} stands for another image ({digest[:19]}…), and a tag is never moved",
            hint="was it tuned again? {cache} in the tag's template tells the two apart; or remove the tag there",
        )
    if signer is not None and not cosign.is_signed_by(registry, name.at(digest), signer):
        raise PublishError(
            f"{name} exists with content that this key has not signed",
            hint="whose is it? `pipeline attestation verify` with their key shows it; remove the tag, or take another",
        )
    return found


def give_tag(
    registry: Registry, name: Reference, index: ImageIndex, signer: cosign.Signer | None
) -> tuple[ImageIndex, bool]:
    """Give a tag that is never moved; return the image that has it then, and whether it was free.

    Registries offer no write that fails where the tag exists: it is looked at just before, and again after, since
    another host may release the same image at the same time. Raises as `image_under_tag` does.
    """
    there = image_under_tag(registry, name, index, signer)
    if there is not None:
        return there, False
    with talk.step(f"tag {name}"):
        registry.put_manifest(name.repository, index.top, name.tag)
    return image_under_tag(registry, name, index, signer) or index, True


def move_tag(registry: Registry, name: Reference, index: ImageIndex) -> bool:
    """Let a tag that moves stand for an index; return whether that had to be done."""
    if registry.resolve(name.repository, name.tag) == index.digest:
        return False
    with talk.step(f"tag {name}"):
        registry.put_manifest(name.repository, index.top, name.tag)
    return True
