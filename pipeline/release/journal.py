"""How far the release of one image came, so that an interrupted one goes on: a file on the host for each.

    <cache home>/releases/<digest of registry, repository and inputs>.json

It is a hint and no proof: what it says is looked up at the registry before it is believed.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.contract.digest import sha256_json
from pipeline.contract.files import write_json


@dataclass(frozen=True)
class Entry:
    """`image` is the digest under which it was pushed, `config` its config digest, `tag` the tag that it is to get;
    `done` once the tag stands, `signed_by` the sha256 of the public key that signed it by then. `own`: it was built
    here, or compared with what was built here.
    """

    image: str
    config: str
    tag: str
    done: bool = False
    signed_by: str = ""
    own: bool = False


@dataclass(frozen=True)
class Journal:
    """The entry of one image at one place: `name` is registry and repository, `inputs` the release's inputs digest."""

    home: Path
    name: str
    inputs: str

    @property
    def path(self) -> Path:
        """Where the entry lies."""
        return self.home / "releases" / f"{sha256_json([self.name, self.inputs])[:32]}.json"

    def read(self) -> Entry | None:
        """What was written last; None where nothing was, or it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Entry(**json.loads(self.path.read_text(encoding="utf-8")))
        return None

    def write(self, entry: Entry) -> None:
        """Write the entry, whole."""
        write_json(self.path, asdict(entry))
