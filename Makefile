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

# Variables come from the command line, or from the environment under PIPELINE_ (PIPELINE_ARCH=90a): never from a bare
# ARCH or IMAGE that a CI exports. The shell expands them in quotes and never parses what they contain. They become
# arguments of the command, which `ps` shows: give a secret by its name alone (SERVER_ENV=HF_TOKEN).
PLAN := TP=tp EP=ep PP=pp DP=dp DEVICE=device ARCH=arch MAX_TOKENS=max-tokens BUCKETS=buckets OPS=ops SKIP_OPS=skip-ops \
  BACKENDS=backends
BUILD := BASE_IMAGE=base-image CACHE=cache SERVER=server SERVER_ARGS=server-args SERVER_ENV=server-env PREVIOUS=previous \
  GPUS=gpus TIMEOUT=timeout TUNE_MAX_WAIT=tune-max-wait STRATEGY=strategy COMPARE=compare \
  COMPARE_BUDGET=compare-budget
RELEASE := REGISTRY=registry MATRIX=matrix TAG=tag FLOATING_TAG=floating-tag CELL=cell VERDICT=verdict SIGN=sign
SWITCHES := ROUND_UP RETUNE REQUIRE_IDLE ACCEPT_BASE_VERSIONS BAKE_JIT DRY_RUN
NAMES := MODEL IMAGE OUT OCI DIR KEY IMAGE_STORE $(foreach pair,$(PLAN) $(BUILD) $(RELEASE),$(firstword $(subst =, ,$(pair)))) $(SWITCHES)
export $(foreach name,$(NAMES),$(if $(filter command,$(origin $(name))),$(name)))

typed = $(if $(filter command,$(origin $(1))),$(value $(1)))
given = "$${$(if $(call typed,$(1)),,PIPELINE_)$(1)-}"
is_set = $(if $(call typed,$(1)),1,$(if $(PIPELINE_$(1)),1))
option = $(if $(call is_set,$(1)),--$(2)=$(call given,$(1)))
options = $(foreach pair,$(1),$(call option,$(firstword $(subst =, ,$(pair))),$(lastword $(subst =, ,$(pair)))))
off = $(filter 0 no false off,$(or $(call typed,$(1)),$(PIPELINE_$(1))))
switch = $(if $(call is_set,$(1)),$(if $(call off,$(1)),,--$(2)))

PLAN_OPTIONS = $(call options,$(PLAN)) $(call switch,ROUND_UP,round-up)
BUILD_OPTIONS = $(PLAN_OPTIONS) $(call options,$(BUILD)) $(call switch,RETUNE,retune) \
  $(call switch,REQUIRE_IDLE,require-idle) $(call switch,ACCEPT_BASE_VERSIONS,accept-base-versions) \
  $(if $(call off,BAKE_JIT),--no-bake-jit)

.PHONY: help image tune plan verify report release attest cache-push cache-pull sync check engine test test-unit test-tune test-engine test-release test-servers lint docs bench clean

help: ## list targets and variables
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  variables, from the command line or as PIPELINE_… from the environment; \`$(VENV)/bin/python -m pipeline build"
	@echo "  --help\` explains each:"
	@echo "$(NAMES) PYTHON" | fold -s -w 110 | sed 's/^/    /'

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

image: $(VENV)/ready ## build an image that has made its first start: make image MODEL=tiny [SERVER=vllm]
	@$(PIPELINE) build $(call given,MODEL) $(BUILD_OPTIONS) $(call option,IMAGE,image)

tune: $(VENV)/ready ## fill the store, without an image: make tune MODEL=tiny [TP=2]
	@$(PIPELINE) tune $(call given,MODEL) $(BUILD_OPTIONS)

plan: $(VENV)/ready ## print what can be baked for a model: make plan MODEL=./model/ TP=8 ARCH=b200
	@$(PIPELINE) plan $(call given,MODEL) $(PLAN_OPTIONS)

verify: $(VENV)/ready ## prove that a finished image makes nothing again: make verify IMAGE=…
	@$(PIPELINE) verify $(call given,IMAGE) $(call option,OUT,output)

report: $(VENV)/ready ## write a page about an image: make report IMAGE=… [OUT=report.html]
	@$(PIPELINE) report $(call given,IMAGE) $(call option,OUT,output)

release: $(VENV)/ready ## push verified images: make release MODEL=tiny REGISTRY=… (or MATRIX=release.toml)
	@$(PIPELINE) release run $(if $(call is_set,MODEL),$(call given,MODEL)) $(call options,$(RELEASE)) $(call switch,DRY_RUN,dry-run) $(BUILD_OPTIONS)

attest: $(VENV)/ready ## check signature and attestations of a pushed image: make attest IMAGE=… [KEY=cosign.pub]
	@$(PIPELINE) attestation verify $(call given,IMAGE) $(call option,KEY,key)

cache-push: $(VENV)/ready ## keep an image's caches in a registry: make cache-push IMAGE=… OCI=oci://… [SIGN=cosign.key]
	@$(PIPELINE) cache push $(call given,IMAGE) $(call given,OCI) $(call option,SIGN,sign)

cache-pull: $(VENV)/ready ## get caches from a registry: make cache-pull OCI=oci://… DIR=caches/…
	@$(PIPELINE) cache pull $(call given,OCI) --output $(call given,DIR) $(call option,KEY,key)

sync: $(VENV)/ready ## render docker/ and requirements/ from versions.json
	@$(PIPELINE) versions sync

check: $(VENV)/ready ## prove that every version agrees with versions.json
	@$(PIPELINE) versions check

engine: $(VENV)/ready ## find or start a Docker Engine
	@$(PIPELINE) daemon up $(call option,IMAGE_STORE,store)

lint: $(VENV)/dev ## ruff and mypy
	@$(VENV)/bin/python -m ruff check . && $(VENV)/bin/python -m ruff format --check . && $(VENV)/bin/python -m mypy

test-unit: $(VENV)/dev ## tests without network and Docker Engine
	@$(PYTEST) tests/unit

test-tune: $(VENV)/dev $(TUNE_VENV)/ready ## the real AutoTuner on CPU ranks, without a Docker Engine
	@$(TUNE_TESTS) $(PYTEST) tests/tune

test-engine: $(VENV)/dev ## tests against the real Docker Engine, which they start
	@$(PYTEST) tests/docker

test-release: $(VENV)/dev ## tests against a real registry, which they install and start
	@$(PYTEST) tests/release

test-servers: $(VENV)/dev ## a real vLLM on CPU, its traps too: minutes for each start
	@$(PYTEST) --run-large tests/servers

# Two processes. Tests that share a Docker Engine or a registry stay together (tests/conftest.py), the others go where there is room.
test: $(VENV)/dev $(TUNE_VENV)/ready ## all tests that this machine can run
	@$(TUNE_TESTS) $(PYTEST) --numprocesses 2 --dist loadscope --durations 25 tests/docker tests/release tests/servers tests/tune tests/unit

docs: $(VENV)/ready ## write docs/reference/commands.md from the parser
	@$(VENV)/bin/python docs/reference/generate.py

bench: $(VENV)/dev ## figures of speed and memory
	@$(VENV)/bin/python -m bench

clean: ## remove what make made in this checkout; caches in the home folder stay
	@rm -rf $(VENV) $(TUNE_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
