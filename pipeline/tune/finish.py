"""What the supervisor does once every rank has ended well: put the result in place. Standard library only.

No rank does it: one that ends badly behind the last meeting would leave a cache where all are told that none was saved.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.contract.key import Key
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import MANIFEST_FILE

from .rank import NO_ROOM, result_path, saved_path, terms_path
from .save import OutUnusable, publish
from .state import forget


def finish(out: Path, work: Path, state: Path | None) -> dict[str, object]:
    """Publish below `out` what the ranks left in `work`, and remove what `state` kept of it; return what is told.

    Raises `OutUnusable`.
    """
    saved = saved_path(work)
    manifest = Manifest.from_json(json.loads(saved.with_name(MANIFEST_FILE).read_bytes()))
    try:
        place = publish(out, Key.parse(manifest.key), saved, manifest)
    except OSError as error:
        kept = "; --state keeps what was tuned" if state is not None else ""
        todo = "free room there" if error.errno in NO_ROOM else "move what is in the way, or name another directory"
        raise OutUnusable(
            f"{error.filename or out} cannot be written to: {error.strerror}", hint=f"nothing was saved{kept}; {todo}"
        ) from error
    forget(state, json.loads(terms_path(work).read_bytes()))
    told: dict[str, object] = json.loads(result_path(work, 0).read_bytes())
    return {"key": told.pop("key"), "path": str(place), **told}
