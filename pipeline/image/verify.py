"""Verify a finished image: `static` looks at files and layers, `replay` runs every op in fresh ranks.

The verdict is bound to the image's config digest and is a file, never a label, which would change what it judged.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.cache.store import check_root
from pipeline.cache.tree import Stored
from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_ROOT, ENV_KEY, ENV_WORKSPACE, MANIFEST_FILE
from pipeline.contract.verdict import Level, Verdict

from .contain import Ended, Sandbox, created, run_side_by_side, run_to_end
from .engine import config_archive, replay_command
from .gpus import NO_GPUS, Gpus
from .halves import half_findings
from .identity import identify
from .imagelayout import check_layout
from .labels import KEY as KEY_LABEL
from .labels import MODULES
from .layers import strangers
from .modulecheck import module_findings

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon.look import Look

_ANYBODY = "65532:65532"  # a user that no image knows: no name, no home

# Who replays, and where it may write. The workspace is the one place that FlashInfer must be able to write to.
SANDBOXES: Mapping[str, Sandbox] = {
    "root": Sandbox(user="0:0"),
    "another user": Sandbox(user=_ANYBODY, environment={ENV_WORKSPACE: "/tmp/workspace"}),  # noqa: S108 - in the container
    "read-only root": Sandbox(user=_ANYBODY, read_only=True, environment={ENV_WORKSPACE: "/tmp/workspace"}),  # noqa: S108
}


_SHORT_OF_MEMORY = "out of memory"


class ImageMissing(UsageError):
    """There is no such image in the engine."""


class VerifyFailed(CacheRefused):
    """The image must not be used as a tuned image; every finding is among the details.

    `hint` is what can be done about it, which depends on where the caches came from.
    """

    def __init__(self, verdict: Verdict, hint: str) -> None:
        first = verdict.findings[0] if verdict.findings else "no finding was recorded"
        super().__init__(
            f"{len(verdict.findings)} findings: {first}",
            details=verdict.findings,
            hint=hint,
        )
        self.verdict = verdict


@dataclass
class _Sheet:
    """What a verify has looked at so far, and what it found."""

    checks: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def count(self, name: str, number: int) -> None:
        self.checks[name] = self.checks.get(name, 0) + number


@dataclass(frozen=True)
class How:
    """How to verify: the wanted level, the bound of each replay in seconds, and how the layers are looked at.

    `present` answers whether a key's device is here; a key whose device is elsewhere is not replayed, and the verdict's
    level is then `static` whatever was wanted.
    """

    level: Level
    max_wait: float
    look: Look
    present: Callable[[Manifest], bool]
    gpus: Gpus = NO_GPUS


def check_present(client: DockerClient, image: str) -> None:
    """Raise `ImageMissing` unless the engine has the image."""
    from docker.errors import ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound as error:
        raise ImageMissing(
            f"there is no image {image} in the engine", hint="`docker images` lists what there is"
        ) from error


def verify(client: DockerClient, image: str, how: How) -> Verdict:
    """Return the verdict on `image`; a failing one is returned too, so that it can be written down.

    Raise `ImageMissing`, `LayoutOther` for an image that another version made, or `ContainerTooSlow` when a replay
    outlives its bound.
    """
    check_present(client, image)
    check_layout(client, image)
    sheet = _Sheet()
    with tempfile.TemporaryDirectory(prefix="verify-") as temporary:
        with log.step("read the cache out of the image"):
            keys = _keys(client, image, Path(temporary) / "root", sheet)
        own = own_keys(client, image, keys)
        count = max(1, len(own))
        identity = identify(client, image, count=count, look=how.look)
        if own:
            sheet.findings += strangers(identity, own)
        manifests = [(stored, stored.manifest) for stored in keys if stored.manifest is not None]
        sheet.count("covered", sum(len(manifest.covered) for _, manifest in manifests))
        hashes = [sha256_file(stored.path / MANIFEST_FILE) for stored, _ in manifests]
    found = [manifest for _, manifest in manifests]
    named = str(client.images.get(image).labels.get(MODULES, ""))
    modules = [name for name in named.split(",") if name]
    sheet.findings += module_findings(client, image, found, modules)
    sheet.count("modules", len(modules))
    replayed = _replay_all(client, image, how, found, sheet)
    complete = bool(replayed) and len(replayed) == len(found)
    return Verdict(
        config_digest=identity.config_digest,
        cache_diff_id=identity.diff_ids[-1],
        manifest_sha256=",".join(hashes),
        key=",".join(manifest.key for _, manifest in manifests),
        device=", ".join(dict.fromkeys(device_name(manifest) for _, manifest in manifests)),
        level="replay" if complete else "static",
        result="fail" if sheet.findings else "pass",
        checks=sheet.checks,
        findings=tuple(sheet.findings),
        replayed=() if complete else tuple(replayed),
    )


def device_name(manifest: Manifest) -> str:
    """The GPU's or processor's name that a key was tuned on."""
    host = manifest.record.host
    return ", ".join(dict.fromkeys(host.gpus)) if host.gpus else str(host.cpu.get("model", "unknown"))


def _keys(client: DockerClient, image: str, root: Path, sheet: _Sheet) -> tuple[Stored, ...]:
    found, findings = read_keys(client, image, root)
    sheet.findings += findings
    sheet.count("keys", len(found))
    return found


def read_keys(client: DockerClient, image: str, root: Path) -> tuple[tuple[Stored, ...], list[str]]:
    """Copy the cache root out of an image to `root`; return its keys, and what is wrong with them."""
    from docker.errors import NotFound

    with created(client, image, ["true"], Sandbox()) as container:
        try:
            chunks, _ = container.get_archive(CACHE_ROOT)
        except NotFound:
            return (), [f"{CACHE_ROOT}: the image has no tuned cache"]
        safe_extract(chunks, root, strip=1)
    tree, findings = check_root(root)
    return tree.keys, [str(finding) for finding in findings]


def own_keys(client: DockerClient, image: str, keys: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """The keys that were baked with this image, by its label; others came with its base and lie further down."""
    named = str(client.images.get(image).labels.get(KEY_LABEL, "")).split(",")
    own = tuple(stored for stored in keys if str(stored.key) in named)
    return own or keys


def _replay_all(client: DockerClient, image: str, how: How, manifests: list[Manifest], sheet: _Sheet) -> list[str]:
    """Replay every key whose device is here; return those keys.

    What is not replayed has the image half of its record compared, which a replay does beside the rest.
    """
    if sheet.findings:
        return []
    absent = [one for one in manifests if how.level == "static" or not how.present(one)]
    if absent:
        with log.step("compare the image half of the record"):
            sheet.findings += half_findings(client, image, absent, max_wait=how.max_wait)
    replayed = []
    until = time.monotonic() + how.max_wait  # of all starts and replays together
    for manifest in manifests:
        if manifest in absent:
            if how.level != "static":
                log.warn(f"NOT REPLAYED: no {device_name(manifest)} here ({manifest.key})")
            continue
        ranks = f"{len(manifest.ranks)} rank{'s' if len(manifest.ranks) > 1 else ''}"
        with log.step(f"replay on {ranks} {', '.join(f'as {who}' for who in SANDBOXES)}"):
            left = replace(how, max_wait=max(1.0, until - time.monotonic()))
            _replay(client, image, manifest, sheet=sheet, how=left)
        replayed.append(manifest.key)
    return replayed


def _replay(client: DockerClient, image: str, manifest: Manifest, *, sheet: _Sheet, how: How) -> None:
    """Replay one key in every sandbox at one time: nothing is measured, so that they do not disturb each other."""
    until = time.monotonic() + how.max_wait
    command = replay_command(manifest, how.max_wait)
    more: dict[str, str] = {}
    engine = manifest.plan.engine
    if engine is not None:
        more = {**engine.variables, ENV_KEY: manifest.key}
    elif client.images.get(image).labels.get(MODULES):  # every module must load as it was baked: no compiler may run
        more = {"FLASHINFER_DISABLE_JIT": "1"}
    volume = (engine.model, config_archive(engine)) if engine is not None else None
    sandboxes = {
        who: replace(one, gpus=how.gpus, environment={**one.environment, **more}, volume=volume)
        for who, one in SANDBOXES.items()
    }
    together = run_side_by_side(client, image, command, list(sandboxes.values()), max_wait=how.max_wait)
    for (who, sandbox), one in zip(sandboxes.items(), together, strict=True):
        ended = one
        if one.status != 0 and _SHORT_OF_MEMORY in f"{one.stdout}{one.stderr}".lower():  # it may fit alone
            left = max(1.0, until - time.monotonic())
            ended = run_to_end(client, image, command, sandbox, max_wait=left)
        _note(who, ended, sheet)


def _note(who: str, ended: Ended, sheet: _Sheet) -> None:
    """Put what one replay told onto the sheet."""
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
    if told.get("other_calls"):  # an image of earlier code does not ask
        sheet.count("calls as others ask", int(told["other_calls"]))
        sheet.count("hits as others ask", int(told["other_hits"]))
    said = [*told.get("misses", ()), *told.get("wrong", ()), *told.get("record_differences", ())]
    sheet.findings += [f"as {who}: {item if isinstance(item, str) else json.dumps(item)}" for item in said]
    if calls == 0:
        sheet.findings.append(f"as {who}: the replay called nothing")
    if ended.status != 0 and not said:
        sheet.findings.append(f"as {who}: the replay ended with {ended.status}: {' / '.join(ended.stderr[-3:])}")
