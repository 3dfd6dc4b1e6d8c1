"""The layout of a tuned image, a number in its label: which questions of ours the code in its /opt/pipeline answers.

1   images without the label: made before layouts were numbered; `pipeline.tune.record` knows no `--image-half`
2   `pipeline.tune.record --image-half`; compiled modules are named by a label; keys of engines replay

`CURRENT_LAYOUT` is raised, with a line here, when the host asks what the code in older images does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.contract.errors import CacheRefused
from pipeline.contract.text import shown

from .labels import CURRENT_LAYOUT, KEY, LAYOUT

if TYPE_CHECKING:
    from docker import DockerClient

_UNNUMBERED = "1"


class LayoutOther(CacheRefused):
    """A tuned image of another layout than the one that this version verifies and changes."""


def check_layout(client: DockerClient, image: str) -> None:
    """Raise `LayoutOther` for a tuned image whose layout is another; an image that holds no key of ours has none."""
    labels = client.images.get(image).labels
    layout = str(labels.get(LAYOUT, _UNNUMBERED))
    if not labels.get(KEY) or layout == str(CURRENT_LAYOUT):
        return
    age = "a newer" if layout.isdecimal() and int(layout) > CURRENT_LAYOUT else "an older"
    raise LayoutOther(
        f"{image} has image layout {shown(layout, 20)}, which {age} version of the pipeline made; "
        f"this one verifies and changes layout {CURRENT_LAYOUT}",
        hint=f"build it again: `pipeline build`; its caches come out with `pipeline cache export {image} DIR`",
    )
