"""Verify a finished image: `static` looks at files and layers, `replay` runs every op in fresh ranks.

The verdict is bound to the image's config digest and is a file, never a label, which would change what it judged.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.cache.store import check_root
from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_ROOT, ENV_WORKSPACE, MANIFEST_FILE
from pipeline.contract.verdict import Level, Verdict

from .contain import Sandbox, created, run_to_end
from .identity import Identity, identify

if TYPE_CHECKING:
    from docker import DockerClient

_ANYBODY = "65532:65532"  # a user that no image knows: no name, no home

# Who replays, and where it may write. The workspace is the one place that FlashInfer must be able to write to.
SANDBOXES: Mapping[str, Sandbox] = {
    "root": Sandbox(),
    "another user": Sandbox(user=_ANYBODY, environment={ENV_WORKSPACE: "/tmp/workspace"}),  # noqa: S108 - in the container
    "read-only root": Sandbox(user=_ANYBODY, read_only=True, environment={ENV_WORKSPACE: "/tmp/workspace"}),  # noqa: S108
}


class ImageMissing(UsageError):
    """There is no such image in the engine."""


class VerifyFailed(CacheRefused):
    """The image must not be used as a tuned image; every finding is among the details."""

    def __init__(self, verdict: Verdict) -> None:
        first = verdict.findings[0] if verdict.findings else "no finding was recorded"
        super().__init__(
            f"{len(verdict.findings)} findings: {first}",
            details=verdict.findings,
            hint="`pipeline image … RETUNE=1` makes the cache again; the image keeps no tag that it did not have",
        )
        self.verdict = verdict


@dataclass
class _Sheet:
    """What a verify has looked at so far, and what it found."""

    checks: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def count(self, name: str, number: int) -> None:
        self.checks[name] = self.checks.get(name, 0) + number


def verify(
    client: DockerClient, image: str, *, containerd_store: bool, level: Level, max_wait: float, deep: bool = False
) -> Verdict:
    """Return the verdict on `image`; a failing one is returned too, so that it can be written down.

    `deep` lists the last layer's files from the engine's export instead of comparing its size with the cache's.
    Raise `ImageMissing`, or `ContainerTooSlow` when a replay outlives `max_wait` seconds.
    """
    from docker.errors import ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound as error:
        raise ImageMissing(
            f"there is no image {image} in the engine", hint="`docker images` lists what there is"
        ) from error
    sheet = _Sheet()
    identity = identify(client, image, containerd_store=containerd_store, deep=deep)
    with tempfile.TemporaryDirectory(prefix="verify-") as temporary:
        root = Path(temporary) / "root"
        with log.step("read the cache out of the image"):
            manifest, manifest_sha = _static(client, image, identity, root, sheet)
    if level == "replay" and manifest is not None and not sheet.findings:
        for who in SANDBOXES:
            with log.step(f"replay on {len(manifest.ranks)} ranks as {who}"):
                _replay(client, image, manifest, who=who, sheet=sheet, max_wait=max_wait)
    return Verdict(
        config_digest=identity.config_digest,
        cache_diff_id=identity.diff_ids[-1],
        manifest_sha256=manifest_sha,
        key=manifest.key if manifest else "",
        device=_device(manifest),
        level=level,
        result="fail" if sheet.findings else "pass",
        checks=sheet.checks,
        findings=tuple(sheet.findings),
    )


def _device(manifest: Manifest | None) -> str:
    if manifest is None:
        return ""
    host = manifest.record.host
    return ", ".join(dict.fromkeys(host.gpus)) if host.gpus else str(host.cpu.get("model", ""))


def _static(
    client: DockerClient, image: str, identity: Identity, root: Path, sheet: _Sheet
) -> tuple[Manifest | None, str]:
    from docker.errors import NotFound

    with created(client, image, ["true"], Sandbox()) as container:
        try:
            chunks, _ = container.get_archive(CACHE_ROOT)
        except NotFound:
            sheet.findings.append(f"{CACHE_ROOT}: the image has no tuned cache")
            return None, ""
        safe_extract(chunks, root, strip=1)
    tree, findings = check_root(root)
    sheet.findings += [str(finding) for finding in findings]
    sheet.count("keys", len(tree.keys))
    _last_layer(identity, root, sheet)
    if not tree.keys or tree.keys[0].manifest is None:
        return None, ""
    manifest = tree.keys[0].manifest
    sheet.count("covered", len(manifest.covered))
    return manifest, sha256_file(tree.keys[0].path / MANIFEST_FILE)


def _last_layer(identity: Identity, root: Path, sheet: _Sheet) -> None:
    if identity.last_size is not None:
        content = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        sheet.count("bytes in the last layer", identity.last_size)
        if identity.last_size != content:
            sheet.findings.append(
                f"the last layer weighs {identity.last_size} bytes, the cache {content}: it is not alone"
            )
        return
    if identity.last_names is None:
        sheet.findings.append("the last layer is far larger than a cache: something was built on top of it")
        return
    sheet.count("files in the last layer", len(identity.last_names))
    inside = CACHE_ROOT.lstrip("/") + "/"
    strangers = [name for name in identity.last_names if not name.startswith(inside)]
    sheet.findings += [f"the last layer holds /{name}, which is no part of the cache" for name in strangers[:5]]
    if not identity.last_names:
        sheet.findings.append("the last layer is empty")


def _replay(client: DockerClient, image: str, manifest: Manifest, *, who: str, sheet: _Sheet, max_wait: float) -> None:
    command = ["python3", "-m", "pipeline.tune.replay", "--key", manifest.key]
    ended = run_to_end(client, image, command, SANDBOXES[who], max_wait=max_wait)
    try:
        told: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        sheet.findings.append(
            f"as {who}: the replay ended with {ended.status} and no result: {' / '.join(ended.stderr[-3:])}"
        )
        return
    calls, hits = int(told.get("calls", 0)), int(told.get("hits", 0))
    sheet.count("replayed calls", calls)
    sheet.count("hits", hits)
    said = [*told.get("misses", ()), *told.get("wrong", ()), *told.get("record_differences", ())]
    sheet.findings += [f"as {who}: {item if isinstance(item, str) else json.dumps(item)}" for item in said]
    if calls == 0:
        sheet.findings.append(f"as {who}: the replay called nothing")
    if ended.status != 0 and not said:
        sheet.findings.append(f"as {who}: the replay ended with {ended.status}: {' / '.join(ended.stderr[-3:])}")
