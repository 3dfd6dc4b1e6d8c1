# The front door. `make help` lists the targets and variables; each target is one command of `pipeline`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
TUNE_VENV := .venv-tune
PIPELINE = $(VENV)/bin/python -m pipeline
PYTEST = $(VENV)/bin/python -m pytest -q
TUNE_TESTS = PIPELINE_TUNE_PYTHON=$(CURDIR)/$(TUNE_VENV)/bin/python PIPELINE_TUNE_OTHER=$(CURDIR)/$(TUNE_VENV)/other

# Values reach the commands through the environment, never through the text of a recipe: no shell reads them.
export MODEL TP EP PP DP DEVICE ARCH MAX_TOKENS BUCKETS OPS SKIP_OPS BACKENDS BASE_IMAGE IMAGE PREVIOUS TIMEOUT STORE TUNE_IN CACHE GPUS STRATEGY JUDGE JUDGE_BUDGET JURORS ENGINE ENGINE_ARGS ENGINE_ENV REGISTRY MATRIX TAG FLOATING_TAG VERDICT KEY CELL OUT OCI DIR

# An option is handed on only when its variable is set; a switch is off for 0, no, false and off.
on = $(filter-out 0 no false off,$(1))
PLAN_OPTIONS = $(if $(TP),--tp "$$TP") $(if $(EP),--ep "$$EP") $(if $(PP),--pp "$$PP") $(if $(DP),--dp "$$DP") \
  $(if $(DEVICE),--device "$$DEVICE") $(if $(ARCH),--arch "$$ARCH") $(if $(MAX_TOKENS),--max-tokens "$$MAX_TOKENS") \
  $(if $(BUCKETS),--buckets "$$BUCKETS") $(if $(OPS),--ops "$$OPS") $(if $(SKIP_OPS),--skip-ops "$$SKIP_OPS") $(if $(BACKENDS),--backends "$$BACKENDS") \
  $(if $(call on,$(ROUND_UP)),--round-up)
TUNE_OPTIONS = $(PLAN_OPTIONS) $(if $(BASE_IMAGE),--base-image "$$BASE_IMAGE") $(if $(call on,$(RETUNE)),--retune) $(if $(PREVIOUS),--previous "$$PREVIOUS") \
  $(if $(TIMEOUT),--timeout "$$TIMEOUT") $(if $(STORE),--store "$$STORE") $(if $(TUNE_IN),--tune-in "$$TUNE_IN") $(if $(CACHE),--cache "$$CACHE") \
  $(if $(GPUS),--gpus "$$GPUS") $(if $(STRATEGY),--strategy "$$STRATEGY") $(if $(JUDGE),--judge "$$JUDGE") $(if $(JUDGE_BUDGET),--judge-budget "$$JUDGE_BUDGET") \
  $(if $(JURORS),--jurors "$$JURORS") \
  $(if $(call on,$(NO_RESUME)),--no-resume) \
  $(if $(ENGINE),--engine "$$ENGINE") $(if $(ENGINE_ARGS),--engine-args="$$ENGINE_ARGS") $(if $(ENGINE_ENV),--engine-env="$$ENGINE_ENV") \
  $(if $(filter 0 no false off,$(BAKE_JIT)),--no-bake-jit) $(if $(call on,$(REQUIRE_IDLE)),--require-idle) \
  $(if $(call on,$(ACCEPT_BASE_VERSIONS)),--accept-base-versions)
RELEASE_OPTIONS = $(if $(REGISTRY),--registry "$$REGISTRY") $(if $(MATRIX),--matrix "$$MATRIX") $(if $(TAG),--tag "$$TAG") \
  $(if $(FLOATING_TAG),--floating-tag "$$FLOATING_TAG") $(if $(CELL),--cell "$$CELL") $(if $(VERDICT),--verdict "$$VERDICT") $(if $(KEY),--sign "$$KEY") \
  $(if $(call on,$(DRY_RUN)),--dry-run)

.PHONY: help image tune plan verify release attest cache-push cache-pull sync check engine test test-unit test-tune test-engine test-release lint bench clean

help: ## list targets and variables
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: MODEL TP EP PP DP DEVICE ARCH MAX_TOKENS BUCKETS OPS SKIP_OPS BACKENDS ROUND_UP BASE_IMAGE IMAGE"
	@echo "             ACCEPT_BASE_VERSIONS RETUNE NO_RESUME PREVIOUS CACHE TUNE_IN BAKE_JIT GPUS REQUIRE_IDLE STRATEGY JUDGE"
	@echo "             JUDGE_BUDGET JURORS ENGINE ENGINE_ARGS ENGINE_ENV TIMEOUT STORE PYTHON"
	@echo "             REGISTRY MATRIX TAG FLOATING_TAG VERDICT KEY CELL DRY_RUN OUT OCI DIR"

# The commands need requirements/host.txt; dev.txt is host.txt and what tests and linters need.
$(VENV)/ready: requirements/host.txt
	@PYTHON="$(PYTHON)" .ci/venv $(VENV) $< $@

$(VENV)/dev: requirements/dev.txt
	@PYTHON="$(PYTHON)" .ci/venv $(VENV) $< $@

# torch and FlashInfer for the tests that drive the real AutoTuner outside a container; beside it another FlashInfer,
# since one code base must serve several: the first of tests/tune/other-flashinfer that is not the pinned one.
$(TUNE_VENV)/ready: requirements/image-cpu.txt tests/tune/other-flashinfer $(VENV)/dev
	@$(PYTHON) -m venv $(TUNE_VENV)
	@$(TUNE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements/image-cpu.txt
	@rm -rf $(TUNE_VENV)/other
	@grep -vFf <(sed -n 's/^\(flashinfer-python==[^ ]*\) .*/\1 /p' requirements/image-cpu.txt) tests/tune/other-flashinfer | sed -n 1p > $(TUNE_VENV)/other.txt
	@$(TUNE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $(TUNE_VENV)/other \
	  --requirement $(TUNE_VENV)/other.txt
	@touch $@

image: $(VENV)/ready ## build a tuned image: make image MODEL=tiny [TP=2]
	@$(PIPELINE) build "$$MODEL" $(TUNE_OPTIONS) $(if $(IMAGE),--image "$$IMAGE")

tune: $(VENV)/ready ## fill the store, without an image: make tune MODEL=tiny [TP=2]
	@$(PIPELINE) tune "$$MODEL" $(TUNE_OPTIONS)

plan: $(VENV)/ready ## say what would be tuned: make plan MODEL=tiny [TP=2]
	@$(PIPELINE) plan "$$MODEL" $(PLAN_OPTIONS)

verify: $(VENV)/ready ## check a finished image: make verify IMAGE=…
	@$(PIPELINE) verify "$$IMAGE" $(if $(OUT),--output "$$OUT")

release: $(VENV)/ready ## push verified images: make release MODEL=tiny REGISTRY=… (or MATRIX=release.toml)
	@$(PIPELINE) release run $(if $(MODEL),"$$MODEL") $(RELEASE_OPTIONS) $(TUNE_OPTIONS)

attest: $(VENV)/ready ## check what proves a pushed image: make attest IMAGE=… [KEY=cosign.pub]
	@$(PIPELINE) attestation verify "$$IMAGE" $(if $(KEY),--key "$$KEY")

cache-push: $(VENV)/ready ## keep an image's caches in a registry: make cache-push IMAGE=… OCI=oci://…
	@$(PIPELINE) cache push "$$IMAGE" "$$OCI" $(if $(KEY),--sign "$$KEY")

cache-pull: $(VENV)/ready ## get caches from a registry: make cache-pull OCI=oci://… DIR=caches/…
	@$(PIPELINE) cache pull "$$OCI" --output "$$DIR" $(if $(KEY),--key "$$KEY")

sync: $(VENV)/ready ## render docker/ and requirements/ from versions.json
	@$(PIPELINE) versions sync

check: $(VENV)/ready ## prove that every version agrees with versions.json
	@$(PIPELINE) versions check

engine: $(VENV)/ready ## find or start a Docker Engine
	@$(PIPELINE) daemon up $(if $(STORE),--store "$$STORE")

lint: $(VENV)/dev ## ruff and mypy
	@$(VENV)/bin/python -m ruff check . && $(VENV)/bin/python -m ruff format --check . && $(VENV)/bin/python -m mypy

test-unit: $(VENV)/dev ## tests without network and engine
	@$(PYTEST) tests/unit

test-tune: $(VENV)/dev $(TUNE_VENV)/ready ## the real AutoTuner on CPU ranks, without an engine
	@$(TUNE_TESTS) $(PYTEST) tests/tune

test-engine: $(VENV)/dev ## tests against the real Docker Engine, which they start
	@$(PYTEST) tests/docker

test-release: $(VENV)/dev ## tests against a real registry, which they install and start
	@$(PYTEST) tests/release

# Two processes. Tests that share an engine or a registry stay together (tests/conftest.py), the others go where there is room.
test: $(VENV)/dev $(TUNE_VENV)/ready ## all tests that this machine can run
	@$(TUNE_TESTS) $(PYTEST) --numprocesses 2 --dist loadscope --durations 25 tests/docker tests/release tests/tune tests/unit

bench: $(VENV)/dev ## figures of speed and memory
	@$(VENV)/bin/python -m bench

clean: ## remove what make made in this checkout; caches in the home folder stay
	@rm -rf $(VENV) $(TUNE_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
