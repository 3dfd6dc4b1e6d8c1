"""Whether an image in a registry has all that proves it, and whether that fits: every answer at once, never the first.

    signature     of the digest that the name leads to
    provenance    SLSA, as BuildKit attached it, of this very image manifest
    sbom          an attached CycloneDX SBOM of this very image manifest
    autotune      for each key of the image's label its manifest.json, by the sha256 that the label names
    server        in place of that, the manifest of the server's start that made the caches
    verdict       replays that passed, of this identity and this cache layer, together of every key
    annotations   what the labels say of the cache, repeated where a registry shows it

What is attached as a referrer can be attached by anyone who may push. So it counts only with a signature of the same
signer; an autotune manifest is bound by the label, which the image's own signature covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import CacheRefused, PublishError
from pipeline.contract.manifest import Manifest as AutotuneManifest
from pipeline.contract.text import shown
from pipeline.contract.verdict import Verdict
from pipeline.image.names import KEY, PREFIX
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import json_object
from pipeline.registry.errors import InvalidResponse, NotFound
from pipeline.registry.reference import Reference

from . import cosign, verdicts
from .attachments import AUTOTUNE, CYCLONEDX, SERVER, VERDICT, Attached, attached
from .images import Image, ImageIndex, read_image, statements, untrusted

State = Literal["ok", "missing", "wrong", "unchecked"]
MANIFEST_LABEL = f"{PREFIX}.manifest"
_ANNOTATED = (KEY, f"{PREFIX}.plan", MANIFEST_LABEL)  # labels that annotations repeat
_SLSA = "https://slsa.dev/provenance/"


@dataclass(frozen=True)
class Answer:
    """One thing that was looked for: its name, how it stands, and one line that says what was found."""

    name: str
    state: State
    what: str

    def __str__(self) -> str:
        return f"{self.state:<9} {self.name}: {self.what}"


@dataclass(frozen=True)
class Evidence:
    """Everything that was found about one image; `digest` is what its name led to."""

    image: str
    digest: str
    answers: tuple[Answer, ...]

    @property
    def complete(self) -> bool:
        """Whether all of it is there and fits."""
        return all(answer.state == "ok" for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """The evidence as JSON values."""
        result = "pass" if self.complete else "fail"
        checks = [asdict(answer) for answer in self.answers]
        return {"image": self.image, "digest": self.digest, "result": result, "checks": checks}

    def demand(self) -> None:
        """Raise `PublishError` unless all of it is there and fits."""
        lacking = [answer for answer in self.answers if answer.state != "ok"]
        if lacking:
            raise PublishError(
                f"{self.image}: {len(lacking)} of {len(self.answers)} checks did not pass: "
                + ", ".join(f"{answer.name} {answer.state}" for answer in lacking),
                hint="the lines above say why; a release attaches all of it",
            )


def examine(registry: Registry, reference: Reference, verifier: cosign.Verifier = cosign.Verifier()) -> Evidence:  # noqa: B008 - frozen
    """Look for all of it. With a `verifier` of nobody signatures are `unchecked`.

    Raises `NotFound`, `InvalidResponse` where it is no image, what `Verifier.check` raises, and what a registry that
    fails raises.
    """
    verifier.check()
    index = read_image(registry, reference.repository, reference.target)
    look = _Look(registry, reference, index, verifier)
    answers = [look.signature()]
    if not index.images:
        answers.append(Answer("image", "wrong", "the index contains no image"))
    for image in index.images:
        made = [look.server(image)] if image.server else look.autotune(image)
        answers += [look.provenance(image), look.sbom(image), *made, look.verdict(image), _annotations(image)]
    return Evidence(str(reference), index.digest, tuple(answers))


def _answered(name: str, find: Callable[[], Answer]) -> Answer:
    """An answer; where what is attached cannot be read or is not what it should be, that is wrong, not a failure."""
    try:
        with untrusted("what is attached"):
            return find()
    except (InvalidResponse, NotFound, CacheRefused) as error:
        return Answer(name, "wrong", error.message)


@dataclass(frozen=True)
class _Look:
    registry: Registry
    reference: Reference
    index: ImageIndex
    verifier: cosign.Verifier
    known: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # statements by image, read once

    def _statements(self, image: Image) -> dict[str, dict[str, Any]]:
        if image.digest not in self.known:
            self.known[image.digest] = statements(self.registry, self.reference.repository, image)
        return self.known[image.digest]

    def _signed(self, digest: str) -> str:
        """Why a digest does not count as signed; empty when it does."""
        return cosign.verify(self.registry, self.reference.at(digest), self.verifier)

    def signature(self) -> Answer:
        subject = self.reference.at(self.index.digest)
        if not cosign.has_signature(self.registry, subject):
            return Answer("signature", "missing", "the image is not signed")
        if not self.verifier:
            return Answer("signature", "unchecked", "there is one, and no key to check it with: give --key cosign.pub")
        wrong = self._signed(self.index.digest)
        return Answer("signature", "wrong", wrong) if wrong else Answer("signature", "ok", f"signed by {self.verifier}")

    def _attached(self, image: Image, kind: str) -> Iterator[Attached]:
        """Attachments of one type, with the reason where they do not count."""
        for one in attached(self.registry, self.reference.repository, image.digest, kind):
            why = one.problem or (self._signed(one.digest) if self.verifier else "")
            yield Attached(one.digest, one.content, f"{one.digest[:19]}… does not count: {why}" if why else "")

    def provenance(self, image: Image) -> Answer:
        def find() -> Answer:
            found = self._statements(image)
            kind = next((name for name in found if name.startswith(_SLSA)), "")
            if not kind:
                return Answer("provenance", "missing", "BuildKit attached none: --provenance=mode=max does")
            if not _is_subject(found[kind], image):
                return Answer("provenance", "wrong", "its subject is another image")
            predicate = found[kind].get("predicate")
            inner = predicate if isinstance(predicate, dict) else {}
            build = inner.get("buildType") or (inner.get("buildDefinition") or {}).get("buildType")
            if not build:
                return Answer("provenance", "wrong", "it does not say how the image was built")
            return Answer("provenance", "ok", f"{kind} by {shown(build, 80)}")

        return _answered("provenance", find)

    def sbom(self, image: Image) -> Answer:
        def judge(content: bytes) -> Answer:
            value = json_object(content, "an SBOM")
            named, listed = value["metadata"]["component"]["version"], value.get("components")
            if named != image.digest:
                return Answer("sbom", "wrong", f"it is of {shown(named, 80)}")
            if not isinstance(listed, list) or not listed:
                return Answer("sbom", "wrong", "it lists nothing")
            return Answer("sbom", "ok", f"CycloneDX, {len(listed)} packages")

        return self._first("sbom", image, CYCLONEDX, judge)

    def server(self, image: Image) -> Answer:
        def judge(content: bytes) -> Answer:
            named = json_object(content, "a server's manifest").get("server")
            what = f"the manifest of a start of {shown(named, 80)}"
            return Answer("server", "ok" if named == image.server else "wrong", what)

        return self._first("server", image, SERVER, judge)

    def _first(self, name: str, image: Image, kind: str, judge: Callable[[bytes], Answer]) -> Answer:
        """What the first attachment that counts says; where none does, why."""

        def find() -> Answer:
            refused = []
            for one in self._attached(image, kind):
                if not one.problem:
                    return judge(one.content)
                refused.append(one.problem)
            return Answer(name, "wrong", refused[0]) if refused else Answer(name, "missing", "none is attached")

        return _answered(name, find)

    def autotune(self, image: Image) -> list[Answer]:
        keys, named = image.keys, image.listed(MANIFEST_LABEL)
        if not keys or len(keys) != len(named):
            return [Answer("autotune", "missing", f"the image's labels name no key in {KEY} and {MANIFEST_LABEL}")]
        found: dict[str, bytes] = {}

        def collect() -> Answer:
            for one in attached(self.registry, self.reference.repository, image.digest, AUTOTUNE):
                found[sha256_bytes(one.content)] = one.content
            return Answer("autotune", "ok", "")

        reached = _answered("autotune", collect)
        if reached.state != "ok":
            return [reached]
        pairs = zip(keys, named, strict=True)
        return [_answered("autotune", partial(_autotune_answer, key, sha, found)) for key, sha in pairs]

    def verdict(self, image: Image) -> Answer:
        def find() -> Answer:
            keys = image.keys
            last = image.diff_ids[-1] if image.diff_ids else ""
            subject = verdicts.Subject(image.identity, last, keys, tuple(image.listed(MANIFEST_LABEL)))
            counted: list[Verdict] = []
            against: list[str] = []
            for one in self._attached(image, VERDICT):
                why = one.problem
                try:
                    found = None if why else verdicts.read(one.content, "a verdict")
                except (InvalidResponse, CacheRefused) as error:
                    found, why = None, f"a verdict cannot be read: {error.message}"
                if found is not None:
                    why = verdicts.mismatch(found, subject)
                    counted += [] if why else [found]
                against += [why] if why else []
            return _verdict_answer(counted, against, keys, proven=bool(keys or image.server))

        return _answered("verdict", find)


def _is_subject(statement: dict[str, Any], image: Image) -> bool:
    """Whether an in-toto statement is about this image."""
    subjects = statement.get("subject")
    digests = {
        str(one["digest"].get("sha256"))
        for one in (subjects if isinstance(subjects, list) else ())
        if isinstance(one, dict) and isinstance(one.get("digest"), dict)
    }
    return image.digest.removeprefix("sha256:") in digests


def _autotune_answer(key: str, sha: str, found: dict[str, bytes]) -> Answer:
    """Whether the manifest that a label names by its sha256 is attached, and is of the label's key."""
    body = found.get(sha)
    if body is None:
        return Answer("autotune", "missing", f"manifest {sha[:12]}… of key {shown(key)} is not attached")
    manifest = AutotuneManifest.from_json(json_object(body, "a manifest"))
    if manifest.key != key:
        what = f"manifest {sha[:12]}… is of key {shown(manifest.key)}, the label names {shown(key)}"
        return Answer("autotune", "wrong", what)
    return Answer("autotune", "ok", f"{key}, {len(manifest.covered)} op × bucket pairs")


def _verdict_answer(counted: list[Verdict], against: list[str], keys: tuple[str, ...], *, proven: bool) -> Answer:
    missing = verdicts.unproven(counted, keys)
    replayed = [one for one in counted if one.replayed_keys()]
    if proven and replayed and not missing:
        devices = dict.fromkeys(shown(one.device, 80) for one in replayed)
        return Answer("verdict", "ok", f"replay pass on {', '.join(devices)}")
    if counted:
        return Answer("verdict", "wrong", f"not replayed: {', '.join(map(shown, missing)) or 'no key at all'}")
    if against:
        return Answer("verdict", "wrong", against[0] + (f" (and {len(against) - 1} more)" if against[1:] else ""))
    return Answer("verdict", "missing", "none is attached")


def _annotations(image: Image) -> Answer:
    labels = image.labels
    lost = [name for name in _ANNOTATED if name in labels and name not in image.annotations]
    other = [name for name in _ANNOTATED if image.annotations.get(name, labels.get(name)) != labels.get(name)]
    if other:
        return Answer("annotations", "wrong", f"they say something else than the labels: {', '.join(other)}")
    if lost or not (image.server or any(name in labels for name in _ANNOTATED)):
        return Answer("annotations", "missing", ", ".join(lost) or "neither labels nor annotations name a key")
    return Answer("annotations", "ok", "as the labels say")
