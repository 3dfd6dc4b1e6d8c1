"""Named contexts under names of their own content.

BuildKit keeps what it received for a local context and, at the next build, receives only what changed into the same
folder. A directory in which something changed then carries the time of that moment, whatever time was sent (seen:
engine 26.1.5), and the layer differs from build to build. A context that has another name for other content is never
received into an old folder. So the name `tuned` in the Dockerfile becomes `tuned-<12 digits>` here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.contract.digest import sha256_json

_FROM = re.compile(rb"(\bfrom=)([a-z][a-z0-9-]*)(?=[\s,])")


def content_name(name: str, place: Path) -> str:
    """`name` with digits over paths, sizes, modes and times below `place`: what BuildKit itself compares."""
    rows = []
    for folder, names, files in os.walk(place):
        for one in (*names, *files):
            path = Path(folder) / one
            stat = path.lstat()
            rows.append([str(path.relative_to(place)), stat.st_mode, stat.st_size * path.is_file(), stat.st_mtime_ns])
    return f"{name}-{sha256_json(sorted(rows))[:12]}"


def pin_contexts(dockerfile: bytes, contexts: Mapping[str, Path]) -> tuple[bytes, dict[str, Path]]:
    """The Dockerfile with each context's name replaced by that of its content, and the contexts under those names."""
    names = {name: content_name(name, place) for name, place in contexts.items()}

    def replaced(match: re.Match[bytes]) -> bytes:
        return match[1] + names.get(match[2].decode(), match[2].decode()).encode()

    return _FROM.sub(replaced, dockerfile), {names[name]: place for name, place in contexts.items()}
