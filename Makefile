# Each target builds .venv first where it is missing or older than the pinned lists: Python 3.10 or newer is all it needs.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

.PHONY: help demo test lint types bench docs examples format venv clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small model in two processes that talk through objcomm (under a minute)"
	@echo "make test    run all tests                    (ARGS='-k name' to choose)"
	@echo "make lint    ruff"
	@echo "make types   mypy --strict"
	@echo "make bench   measure against torch and others (ARGS='--help' for how)"
	@echo "make docs    the documents as a site, into build/site"
	@echo "make examples the drop-in under Accelerate and Lightning"
	@echo "make clean   remove the venv and whatever the tools cached"

demo: venv
	@$(PY) -m objcomm demo $(ARGS)

test: venv
	@$(PY) -m pytest $(ARGS)

lint: venv
	@$(PY) -m ruff check .

format: venv
	@$(PY) -m ruff check --fix .

types: venv
	@$(PY) -m mypy

bench: $(VENV)/.bench
	@$(PY) -m objcomm bench $(ARGS)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

examples: $(VENV)/.frameworks
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/drop_in/with_accelerate.py
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/drop_in/with_lightning.py

venv: $(VENV)/.dev

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("objcomm needs Python 3.10 or newer, and %s is %s: name another one, make PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The project itself is installed without its dependencies and without a build environment of its own, so that nothing
# but the pinned lists decides what is installed.
$(VENV)/.dev: $(VENV)/.python pyproject.toml requirements/run.txt requirements/dev.txt
	$(PY) -m pip install --quiet --requirement requirements/dev.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.bench: $(VENV)/.dev requirements/bench.txt
	$(PY) -m pip install --quiet --requirement requirements/bench.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.dev requirements/docs.txt
	$(PY) -m pip install --quiet --requirement requirements/docs.txt
	@touch $@

$(VENV)/.frameworks: $(VENV)/.dev requirements/frameworks.txt
	$(PY) -m pip install --quiet --requirement requirements/frameworks.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
