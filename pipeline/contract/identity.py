"""What an image is, in one digest that every store and registry gives alike.

Layers alone do not change with ENV, and the inspect of the containerd store has no config digest: so it is one sha256
over the diff ids of the layers and over what a container gets from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .digest import sha256_json

_CONFIG = ("Env", "Entrypoint", "Cmd", "User", "Labels")


def image_identity(diff_ids: Sequence[str], config: Mapping[str, Any]) -> str:
    """`sha256:…` over the diff ids (lowest layer first) and Env, Entrypoint, Cmd, User, Labels of an OCI config."""
    kept = {name: config.get(name) or None for name in _CONFIG}
    return f"sha256:{sha256_json({'layers': list(diff_ids), **kept})}"
