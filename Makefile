# Two commands do all the set-up on a fresh machine: `make quickstart` and `make test`.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# Workers with one thread each are quicker than one with two threads; a third fills the time in which tests wait for
# processes that they start. Each takes a part of the tests in their order, so that what a module prepares is prepared
# once, and the first to end helps the others.
WORKERS ?= 3
export OMP_NUM_THREADS ?= 1
# Without bytecode every process that a test starts would compile some 5000 modules of its libraries anew, for 15 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart test check lint types docs long mutants release clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

# What runs need, and what developers need on top of it.
$(VENV)/.runs: WHAT = .
$(VENV)/.installed: WHAT = .[dev]
$(VENV)/.runs $(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIPFLAGS) --editable "$(WHAT)"
	touch $(VENV)/.runs $@

install: $(VENV)/.installed ## make the environment in .venv, with the developers' tools

quickstart: $(VENV)/.runs ## make the environment and run the quickstart (no download of models or data)
	OMP_NUM_THREADS=$$(nproc) $(BIN)/llm-fed quickstart

test: $(VENV)/.installed ## make the environment and pass the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: lint types test ## what has to pass before a change lands

docs: $(VENV)/.installed ## build the documentation site into site/, which opens from there without a server
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

long: $(VENV)/.installed ## what is too long for every change: slow tests, kills, hostile files, benchmarks
	bash scripts/long.sh

mutants: $(VENV)/.installed ## plant forty faults, one after another, and see whether a test notices each
	$(BIN)/python scripts/mutants/plant.py

release: ## build sdist and wheel into dist, and try the wheel with every Python from 3.11 to 3.13 that is here
	bash scripts/release.sh

clean: ## delete the environment and caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
