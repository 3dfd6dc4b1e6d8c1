"""Model + layout + versions → Plan. Standard library only at import; needs no Docker Engine, torch or GPU."""

from __future__ import annotations

from .plan import make_plan

__all__ = ["make_plan"]
