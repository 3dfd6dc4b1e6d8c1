"""Where a tuned cache came from, written into its manifest once: when it is kept, and never when it is baked.

What is baked again from the store so has the same bytes, and gives the same layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.cache.tree import Tree
from pipeline.contract.digest import sha256_file, sha256_json
from pipeline.contract.files import write_json
from pipeline.contract.places import MANIFEST_FILE

from .prepare import Prepared
from .request import Request
from .staging import code_content


def provenance(request: Request, prepared: Prepared, tuner: str) -> dict[str, str]:
    """What the host knows beside the ranks: digests of the plan, the base, the tuner image, versions.json, our code.

    Ranks, strategy, driver, start and end are in the manifest itself.
    """
    return {
        "plan": prepared.plan.digest,
        "base_image": prepared.base.reference,
        "base_image_digest": prepared.base.image_id,
        "tuner_image_digest": tuner,
        "versions_json": sha256_file(request.root / "versions.json"),
        "code": sha256_json(code_content()),
    }


def stamp(tree: Tree, said: Mapping[str, str]) -> None:
    """Write it into the manifest of every key of a root that was judged sound."""
    for stored in tree.keys:
        if stored.manifest is not None:
            write_json(stored.path / MANIFEST_FILE, replace(stored.manifest, provenance=said).to_json())
