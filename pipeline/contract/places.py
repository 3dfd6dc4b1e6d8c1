"""Paths inside the image and the names of environment variables; docs/paths.md is held against this module."""

from __future__ import annotations

CACHE_ROOT = "/opt/flashinfer_autotune_cache"
CODE_ROOT = "/opt/pipeline"
STATE_ROOT = "/state"  # finished ops of a tuning that goes on, in build stages only
TUNING_ROOT = "/opt/tuning"  # plan.json, in build stages only
CACHE_FILE = "autotune_configs.json"
MANIFEST_FILE = "manifest.json"
ENGINE_DIR = "engine"  # beside the manifest: the files as an engine wrote them, laid out as it looks for them
FAILURE_FILE = "failure.json"
PLAN_FILE = "plan.json"

ENV_CACHE_DIR = "PIPELINE_AUTOTUNE_CACHE_DIR"
ENV_KEY = "PIPELINE_TUNED_KEY"  # which key to use where several fit: the key, or the start of its hash
ENV_WORKSPACE = "FLASHINFER_WORKSPACE_BASE"
