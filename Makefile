# The developer's interface. Each target does all of its own set-up and is quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The tests start a thousand processes: what one has compiled the next need not compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup dev-setup browser demo example test test-slow test-all test-exhaustive test-remote fuzz soak lint format bench bench-cpu bench-gpu docs
.PHONY: docs-rules docs-cli docs-packages clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## Create the virtual environment

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what constraints.txt pins into $(VENV) ..."
	@$(PIP) --editable '.[torch,scan,plot]'
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.ready
	@echo "installing what tests and linters need into $(VENV) ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	@$(PIP) --editable '.[docs]'
	@touch $@

dev-setup: $(VENV)/.dev-ready

# The pages are tested in a real browser, Debian's; without root it has to be there already.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& echo "installing chromium for the tests of the pages ..." \
		&& apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
		|| echo "no chromium: the tests of the pages in a browser will be skipped"

demo: setup  ## Train through faults, prove that none left a trace, and explain one
	@$(BIN)/nanguard demo

example: dev-setup  ## Break, explain and repair one of the five systems: make example NAME=radio_diffusion
	@$(BIN)/python -m examples.story $(NAME)

test: dev-setup browser  ## Run the tests that take 5 minutes on two cores: all but the slow ones
	@$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow"

test-slow: dev-setup browser  ## Run the slow tests: stories, browsers, kills, ranks
	@# Ranks wait for each other, and disks are filled: with fewer others beside them. Both parts report.
	@failed=0; \
	$(BIN)/python -m pytest -n 3 --dist loadfile -m slow --ignore tests/guard --ignore tests/snapshots || failed=1; \
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow tests/guard tests/snapshots || failed=1; \
	exit $$failed

test-all: dev-setup browser  ## Run both; all of it runs and reports, even if a part fails
	@failed=0; $(MAKE) test || failed=1; $(MAKE) test-slow || failed=1; exit $$failed

test-exhaustive: dev-setup browser  ## Run every cause of the five systems and every open case, too; half an hour
	@NANGUARD_TESTS=exhaustive $(BIN)/python -m pytest -n 2 --dist loadfile

test-remote: dev-setup  ## Run the tests that need a server and a cluster on this machine
	@$(PIP) --editable '.[dev-remote]'
	@$(BIN)/python -m pytest tests/check/test_remote.py tests/check/test_ray.py

SECONDS ?= 600
FUZZ_SEED ?= 0
fuzz: dev-setup  ## Check damaged files and compare with other readers: make fuzz SECONDS=600 FUZZ_SEED=0
	@$(BIN)/python -m benchmarks.fuzz --seconds $(SECONDS) --seed $(FUZZ_SEED) --processes 2

soak: dev-setup  ## Kill runs, fill disks, change files under a reader: make soak SECONDS=600
	@$(BIN)/python -m benchmarks.soak --seconds $(SECONDS)

lint: dev-setup  ## Check style, types and the direction of imports
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: dev-setup  ## Bring the code into shape
	@$(BIN)/ruff check --fix src tests benchmarks examples
	@$(BIN)/ruff format src tests benchmarks examples

bench: bench-cpu  ## Measure what this machine can measure

bench-cpu: dev-setup  ## Measure on this CPU and write benchmarks/results: make bench-cpu ONLY=ops_speed
	@$(BIN)/python -m benchmarks.suite cpu $(if $(ONLY),--only $(ONLY))

bench-gpu: dev-setup  ## Measure on this GPU and write benchmarks/results
	@$(BIN)/python -m benchmarks.suite gpu $(if $(ONLY),--only $(ONLY))

docs/%.png: docs/picture.py $(wildcard src/nanguard/view/report/html/*.py src/nanguard/view/report/html/assets/*)
	@echo "making $@ from a run ..."
	@$(BIN)/python docs/picture.py $@ && touch $@

docs: $(VENV)/.docs-ready browser docs/incident.png docs/report.png  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

docs-rules: dev-setup  ## Write docs/rules/ anew from the rules
	@$(BIN)/python -m nanguard.cli.rulepages docs/rules

docs-cli: dev-setup  ## Write docs/cli.md anew from the commands
	@$(BIN)/python -m nanguard.cli.help_pages > docs/cli.md

docs-packages: dev-setup  ## Draw the packages anew in docs/architecture.md
	@$(BIN)/python docs/package_drawing.py

clean:  ## Remove everything that make has made
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
