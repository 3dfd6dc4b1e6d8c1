"""Model + layout + versions → Plan. Standard library only at import; needs no engine, torch or GPU."""

from __future__ import annotations

from .make import make_plan

__all__ = ["make_plan"]
