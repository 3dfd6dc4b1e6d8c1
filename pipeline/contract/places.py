"""Paths inside the image and the names of environment variables; docs/reference/paths.md lists them."""

from __future__ import annotations

CACHE_ROOT = "/opt/flashinfer_autotune_cache"
CODE_ROOT = "/opt/pipeline"  # bin/pipeline-run, and lib/, which only that finds
STATE_ROOT = "/state"  # finished ops of a tuning that goes on, in the container that tunes
# The tuner and plan.json, in the tuner image and mounted into replays, never in the finished image. At the root: into a
# read-only container the engine copies nothing whose path leads through a link, and `/opt` may be one.
TUNER_ROOT = "/tuner"
CACHE_FILE = "autotune_configs.json"
MANIFEST_FILE = "manifest.json"
FAILURE_FILE = "failure.json"
PLAN_FILE = "plan.json"

ENV_CACHE_DIR = "PIPELINE_AUTOTUNE_CACHE_DIR"
ENV_FILE = "PIPELINE_TUNED_CACHE"  # the path of the chosen FlashInfer file
ENV_KEY = "PIPELINE_TUNED_KEY"  # which key to use where several fit: the key, or the start of its hash
ENV_REQUIRE = "PIPELINE_REQUIRE_TUNED"  # 1: end with 7 before CMD starts when no tuned cache fits
ENV_WORKSPACE = "FLASHINFER_WORKSPACE_BASE"
