"""Versions that disagree in a repository that is not built this way: no source to trust, only places to compare.

walk.py     which files are looked at, and what each is
places.py   one value at one place
readers.py  files to places: Dockerfiles, bake files, requirements, pyproject.toml; scripts.py: YAML, shell, Python
            (yamltree.py: the nodes of YAML)
commands.py what commands and image references say, wherever they stand
judge.py    places to findings: which names are one, which values differ, how sure that is and why; labels.py: of labels
"""

from __future__ import annotations

from .judge import judge
from .places import Place
from .verdict import Confidence, Disagreement
from .walk import Report, look

__all__ = ["Confidence", "Disagreement", "Place", "Report", "judge", "look"]
