"""Model + layout + versions → Plan. Needs no Docker Engine, torch or GPU."""

from __future__ import annotations

from .plan import make_plan

__all__ = ["make_plan"]
