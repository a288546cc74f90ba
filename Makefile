# Everything runs in an environment that the first target that needs it sets up: .venv with the CPU
# build of vLLM, .venv-gpu with the CUDA build. DEVICE=cpu or DEVICE=gpu chooses one. Without it,
# `venv` and `serve` take the CUDA build on a machine with an NVIDIA driver, and everything else the
# CPU build, for which checks and tests are written.
.DEFAULT_GOAL := help
.PHONY: help venv serve test test-slow test-kills soak fuzz docs docs-references dashboards k8s sizing check check-quick format bench check-gpu train-tiny eval-tiny lock pin clean

PYTHON ?= python3
ifdef DEVICE
SERVE_ON := $(DEVICE)
else
DEVICE := cpu
SERVE_ON := $(shell if nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then echo gpu; else echo cpu; fi)
endif
$(if $(filter cpu gpu,$(DEVICE)),,$(error DEVICE is '$(DEVICE)': choose cpu or gpu))
KILLS ?= 50
REQUESTS ?= 5000
SEED ?= 0
SOAK_MINUTES ?= 30
FUZZ_EXAMPLES ?= 150

VENV_cpu := .venv
VENV_gpu := .venv-gpu
VENV := $(VENV_$(DEVICE))
BIN := $(VENV)/bin
# Lies in the environment, so that removing the environment makes it be built again.
INSTALLED := $(VENV)/installed-$(DEVICE)
SERVE_VENV := $(VENV_$(SERVE_ON))
SERVE_INSTALLED := $(SERVE_VENV)/installed-$(SERVE_ON)
# Tests start many commands, and each would compile the modules of this repository again.
unexport PYTHONDONTWRITEBYTECODE
# Once, even if there was no network.
SERVE_FETCHED := $(SERVE_VENV)/fetched
TORCH := -r requirements/torch-cpu.txt
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet --no-deps
EXTRAS := --extra serve --extra train --extra loadtest --extra redis
COMPILE := UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-annotate pyproject.toml

help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

venv: $(SERVE_FETCHED) ## Set up .venv, or .venv-gpu, with everything pinned (CPU: about 4 GB), and fetch apar-smollm2

$(SERVE_FETCHED): $(SERVE_INSTALLED)
	$(SERVE_VENV)/bin/apar fetch || echo "Set up without apar-smollm2. To fetch it later: $(SERVE_VENV)/bin/apar fetch" >&2
	touch $@

serve: $(SERVE_FETCHED) ## Serve apar-smollm2 on http://127.0.0.1:8000/v1, or the embedded model if it was not fetched
	$(SERVE_VENV)/bin/apar serve

test: $(INSTALLED) ## Run every test that needs no GPU and is not slow (8 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow and not gpu and not kills" --numprocesses auto

test-slow: $(INSTALLED) ## Run the slow tests, and the property tests on four times as many examples
	$(BIN)/python -m pytest -m "slow and not gpu and not kills" --junitxml out/slow.xml tests
	APAR_ALL_EXAMPLES=1 $(BIN)/python -m pytest -m "hypothesis and not slow" --numprocesses auto

test-kills: $(INSTALLED) ## Kill 50 gateways, replicas, engines, HAProxies and controllers under load (25 minutes; KILLS=, REQUESTS=, SEED=)
	APAR_KILLS=$(KILLS) APAR_KILL_REQUESTS=$(REQUESTS) APAR_KILL_SEED=$(SEED) $(BIN)/python -m pytest -m kills tests/integration/serving/test_kills.py

soak: $(INSTALLED) ## Serve mixed load for SOAK_MINUTES=30 and watch every process's memory
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

fuzz: $(INSTALLED) ## Fuzz the HTTP API from its OpenAPI description
	APAR_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/integration/serving/test_fuzz.py

dashboards: $(INSTALLED) ## Write the metrics reference and Grafana's dashboards
	$(BIN)/python -m deployments.metrics
	$(BIN)/python -m dashboards.grafana

k8s: $(INSTALLED) ## Write Prometheus' rules as a Kubernetes object
	$(BIN)/python -m k8s

sizing: $(INSTALLED) ## Write k8s/SIZING.md, plans for common models (5 minutes on 2 cores)
	$(BIN)/python -m k8s.sizing

docs: $(INSTALLED) ## Build the documentation site in out/site; fails on dead links
	$(BIN)/python -m docs.build

docs-references: $(INSTALLED) ## Rewrite the references of configuration, command line and recipes
	$(BIN)/python -m docs.build --generate

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

check-gpu: $(SERVE_INSTALLED) ## Measure how wrong predictions are on this GPU, and its step costs (10 minutes)
	PYTHON=$(SERVE_VENV)/bin/python benchmarks/gpu/check.sh --only predictions --minutes 30

train-tiny: $(INSTALLED) ## Train the embedded model again (16 minutes on 2 cores)
	$(BIN)/apar train-tiny

eval-tiny: $(INSTALLED) ## Check the embedded model on held-out prompts
	$(BIN)/python -m apar_core.offline.evaluation.fork_check

lock: ## Resolve requirements/*.txt again; needs uv. Kept versions stay as they are
	$(COMPILE) requirements/cpu.in $(EXTRAS) --extra cpu --excludes requirements/not-from-pypi.txt \
		--output-file requirements/cpu.txt
	$(COMPILE) requirements/gpu.in $(EXTRAS) --extra gpu --output-file requirements/gpu.txt
	$(COMPILE) --extra dev --constraints requirements/cpu.txt --output-file requirements/dev.txt \
		$$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' requirements/cpu.txt)
	$(filter-out pyproject.toml,$(COMPILE)) requirements/clients.in --output-file requirements/clients.txt

pin: ## Pin images to digests, and torch's CPU build to its hashes; needs a network, docker and curl
	sh containers/pin.sh

clean: ## Remove .venv, .venv-gpu and everything generated
	rm -rf $(VENV_cpu) $(VENV_gpu) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV_cpu)/bin/python $(VENV_gpu)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(dir $(@D))

# cpu.txt leaves torch out, whose CPU build is not on PyPI. It comes from PyTorch's own index, unless
# pip already knows a place that has it. All other files are checked against their hashes.
$(VENV_cpu)/installed-cpu: $(VENV_cpu)/bin/python pyproject.toml requirements/torch-cpu.txt requirements/cpu.txt requirements/dev.txt
	$< $(PIP_INSTALL) $(TORCH) || $< $(PIP_INSTALL) $(TORCH) --extra-index-url $(TORCH_INDEX)
	$< $(PIP_INSTALL) -r requirements/cpu.txt -r requirements/dev.txt
	$< $(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

$(VENV_gpu)/installed-gpu: $(VENV_gpu)/bin/python pyproject.toml requirements/gpu.txt requirements/dev.txt
	$< $(PIP_INSTALL) -r requirements/gpu.txt -r requirements/dev.txt
	$< $(PIP_INSTALL) --no-build-isolation --editable .
	touch $@
