# Everything there is to run. `make` alone says what.

# The first interpreter on PATH that is new enough; `make PYTHON=/path/to/python …` takes that one.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$python; exit; }; done; echo python3)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
# Code that is being checked must be the code of this checkout, whatever the caller's environment says.
export PYTHONPATH :=
# A test run starts hundreds of processes; each would compile the whole package again where this is forbidden.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo dev test check storm mutants bench docs screenshots django release clean

help: ## Print this help
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/core.stamp ## See it work: the standard library as jobs, a worker killed halfway, totals compared
	@$(BIN)/python -m examples.demo

dev: $(VENV)/web.stamp ## Run API and worker for development
	@$(BIN)/holdfast dev

# A test runs this file by the command that its README documents: once is enough.
RUN_BY_README := --ignore=tests/examples/test_delayed_queue_workers.py

# `make check` runs these.
CHECKED := --ignore=tests/conventions --ignore=tests/typing

test: $(VENV)/dev.stamp $(VENV)/npm.stamp ## Run every test but the storm and those of `make check` (two calls, four at a time: the crash tests come last)
	@$(BIN)/python -m pytest -q -n 4 --dist=worksteal -m "not crash and not storm" $(CHECKED)
	@$(BIN)/python -m pytest -q -n 4 --dist=worksteal -m "crash and not storm" tests/crash tests/examples $(RUN_BY_README)

check: $(VENV)/dev.stamp ## Format, lint, types, imports and house rules, in under 30 seconds
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tools.language
	@$(BIN)/python -m pytest -q tests/conventions tests/typing

storm: $(VENV)/dev.stamp ## Run the long fault suite; goes on where it was interrupted (STORM="--parallel 3")
	@$(BIN)/python -m tests.storm $(STORM)

# What CHANGED=1 compares with.
BASE ?= origin/main

mutants: $(VENV)/dev.stamp ## Take guards out of the code, one at a time, and run their tests; goes on where it was (CHANGED=1: only changed guards)
	@$(BIN)/python -m tools.mutants $(if $(CHANGED),--changed $(BASE)) $(MUTANTS)

bench: $(VENV)/bench.stamp ## Measure against the raw database and against a peer, in one run
	@$(BIN)/python -m benchmarks

docs: $(VENV)/docs.stamp $(VENV)/npm.stamp build/screenshots ## Build the documentation site, in build/site, and check it in a browser
	@$(BIN)/python -m tools.site --pictures build/screenshots
	@$(BIN)/python -m tools.site.check

screenshots: $(VENV)/dev.stamp $(VENV)/npm.stamp ## Take pictures of all pages of the console, in build/screenshots
	@$(BIN)/python -m tests.console.screenshots

build/screenshots: | $(VENV)/npm.stamp
	@$(BIN)/python -m tests.console.screenshots

django: $(VENV)/core.stamp ## Run the tests of django.tasks and of examples/shop on Django 5.2 and 6, each in its own environment
	@$(BIN)/python -m tools.django_tasks_suite $(DJANGO)

release: $(VENV)/release.stamp ## Build sdist, wheel and SBOM in dist, and check each extra in a clean environment
	@$(BIN)/python -m tools.release

clean: ## Remove the virtual environment and every cache
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up, again only when pyproject.toml changes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { \
		echo "Holdfast needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) …"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/core.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e .
	@touch $@

$(VENV)/web.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e '.[web]'
	@touch $@ $(VENV)/core.stamp

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/core.stamp $(VENV)/web.stamp

# Packages of npm for tests: generators of clients and a browser. Tests that find them missing install them too.
$(VENV)/npm.stamp: tests/npm/package-lock.json $(VENV)/dev.stamp
	@$(BIN)/python -m tests.support.node
	@touch $@

$(VENV)/bench.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e '.[bench]'
	@$(PIP) install --no-deps arq # it asks for an older redis-py than all others, and runs with theirs
	@touch $@ $(VENV)/core.stamp

$(VENV)/docs.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e '.[docs]'
	@touch $@ $(VENV)/core.stamp

$(VENV)/release.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e '.[release]'
	@touch $@ $(VENV)/core.stamp
