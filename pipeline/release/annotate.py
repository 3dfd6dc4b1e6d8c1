"""OCI annotations of a released image: its labels, and what may change without changing the image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.contract.text import shown
from pipeline.image.flow import Finished
from pipeline.image.labels import PREFIX, labels
from pipeline.run import ProcessFailed, ProgramMissing, run

from .faults import AnnotationsInvalid

INPUTS = f"{PREFIX}.inputs"  # the release's inputs digest: the same one is not built or pushed again
_OCI = "org.opencontainers.image"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def check_own(own: Mapping[str, str]) -> dict[str, str]:
    """The user's annotations; raise `AnnotationsInvalid` on names that are ours, and on what cannot be one."""
    wrong = [f"{name} is set by the release itself" for name in own if name.startswith(PREFIX)]
    wrong += [f"{shown(name, 60)} is no name of an annotation" for name in own if not _NAME.fullmatch(name)]
    wrong += [f"{shown(name, 60)} has control characters in its value" for name in own if not own[name].isprintable()]
    if wrong:
        raise AnnotationsInvalid(wrong[0], details=wrong, hint='such as "org.opencontainers.image.licenses"')
    return dict(own)


def notes_of(done: Finished, inputs: str, revision: str, own: Mapping[str, str]) -> dict[str, str]:
    """All annotations of one image; `own` are the user's and win over the standard ones."""
    found = labels(done.keys, done.prepared.base.reference, done.prepared.modules)
    found[f"{_OCI}.created"] = max(manifest.ended for manifest in done.manifests)
    found[INPUTS] = inputs
    if revision:
        found[f"{_OCI}.revision"] = revision
    return {**found, **own}


def revision_of(root: Path) -> str:
    """The commit of the checkout, with `-dirty` behind it where files differ from it; empty where there is no git."""
    try:
        done = run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture=True,
            timeout=30,
        )
    except (ProcessFailed, ProgramMissing):
        return ""
    return done.stdout.strip()
