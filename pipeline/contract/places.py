"""Paths inside the image and the names of environment variables; docs/paths.md is held against this module."""

from __future__ import annotations

CACHE_ROOT = "/opt/flashinfer_autotune_cache"
CODE_ROOT = "/opt/pipeline"
TUNING_ROOT = "/opt/tuning"  # plan.json, in build stages only
CACHE_FILE = "autotune_configs.json"
MANIFEST_FILE = "manifest.json"
FAILURE_FILE = "failure.json"
PLAN_FILE = "plan.json"

ENV_CACHE_DIR = "PIPELINE_AUTOTUNE_CACHE_DIR"
ENV_WORKSPACE = "FLASHINFER_WORKSPACE_BASE"
