# The developer's interface. Each target does all of its own set-up and is quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help setup demo test test-remote lint format bench docs docs-rules clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## Create the virtual environment

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what constraints.txt pins into $(VENV) ..."
	@$(PIP) --editable '.[torch,scan,dev]'
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	@$(PIP) --editable '.[docs]'
	@touch $@

demo: setup  ## Train through faults, prove that none left a trace, and explain one
	@$(BIN)/nanguard demo

test: setup  ## Run the tests
	@$(BIN)/python -m pytest

test-remote: setup  ## Run the tests that need a server and a cluster on this machine
	@$(PIP) --editable '.[dev-remote]'
	@$(BIN)/python -m pytest tests/engine/test_remote.py tests/engine/test_ray.py

lint: setup  ## Check style, types and the direction of imports
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/ruff format --check src tests benchmarks
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup  ## Bring the code into shape
	@$(BIN)/ruff check --fix src tests benchmarks
	@$(BIN)/ruff format src tests benchmarks

bench: setup  ## Measure what this machine can measure
	@$(BIN)/python -m benchmarks.guard_overhead

docs: $(VENV)/.docs-ready  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

docs-rules: setup  ## Write docs/rules/ anew from the rules
	@$(BIN)/python -m nanguard.cli.rulepages docs/rules

clean:  ## Remove everything that make has made
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
