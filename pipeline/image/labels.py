"""The labels of a finished image."""

from __future__ import annotations

from collections.abc import Sequence

from .caches import Baked
from .naming import key_of

PREFIX = "io.github.tuned-image-pipeline"
KEY = f"{PREFIX}.key"
MODULES = f"{PREFIX}.modules"  # names of the compiled modules in the layer below the caches
LAYOUT = f"{PREFIX}.layout"
CURRENT_LAYOUT = 2  # what the code in the image answers, and where it keeps what: imagelayout.py


def labels(keys: Sequence[Baked], base: str, modules: Sequence[str] = ()) -> dict[str, str]:
    """What the image is, and for each key its path, plan digest and manifest digest, separated by commas."""
    manifests = [one.manifest for one in keys]
    compiled = {MODULES: ",".join(modules)} if modules else {}
    return {
        **compiled,
        "org.opencontainers.image.title": f"{manifests[0].plan.model}, tuned",
        "org.opencontainers.image.version": f"{manifests[0].plan.flashinfer_version}-{key_of(manifests)[:8]}",
        "org.opencontainers.image.base.name": base,
        **key_labels(keys),
    }


def key_labels(keys: Sequence[Baked]) -> dict[str, str]:
    """The part of the labels that says which keys an image holds."""
    plans = [one.manifest.plan for one in keys]
    return {
        LAYOUT: str(CURRENT_LAYOUT),
        KEY: ",".join(str(one.key) for one in keys),
        f"{PREFIX}.plan": ",".join(plan.digest for plan in plans),
        f"{PREFIX}.manifest": ",".join(one.manifest_sha256 for one in keys),
        f"{PREFIX}.flashinfer": plans[0].flashinfer_version,
        f"{PREFIX}.arch": ",".join(dict.fromkeys(one.key.arch for one in keys)),
    }
