# Everything a fresh machine needs: Python 3.11, 3.12 or 3.13, make and a C++ compiler.
#   make demo     a whole RLHF lifecycle (installs first)
#   make test     every part, and one whole lifecycle under injected faults
# EXTRA=cuda installs the CUDA builds instead of the CPU ones; PYTHON= chooses the interpreter. Both are remembered.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
EXTRA ?= $(or $(shell head -n 1 .venv/.installed 2> /dev/null),cpu)
PYTHON ?= $(or $(shell for python in $(BIN)/python python3.11 python3.12 python3.13; do \
	$$python -c '' 2> /dev/null && echo $$python && break; done),python3)

.PHONY: help install constraints stubs demo test test-long lint style checks types docs audit-deps unit component lifecycle peers mutants clean

help:  ## show this
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install:  ## install into .venv (once; again after pyproject.toml or constraints.txt changed)
	@$(PYTHON) .ci/install.py $(EXTRA)

# One resolution holds for every Python, machine and extra, since it is made for all of them together.
constraints: install  ## pin the newest of every dependency in constraints.txt
	@env -u PIP_FIND_LINKS -u UV_FIND_LINKS $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--all-extras --no-header --no-annotate --output-file constraints.txt pyproject.toml > /dev/null
	@sed -E -i -f .ci/constraints.sed constraints.txt

stubs: install  ## write xray/__init__.pyi again: what type checkers know of the stage kinds
	$(BIN)/python .ci/stubs.py

demo: install  ## run the quickstart lifecycle into runs/quickstart
	$(BIN)/xray run configs/quickstart.yaml

test:  ## style and types, dependencies, unit, component and end-to-end tests
	@for part in install style audit-deps checks component lifecycle; do \
		echo "=== make $$part"; SECONDS=0; $(MAKE) --no-print-directory $$part; \
		echo "=== make $$part: $$((SECONDS / 60)) min $$((SECONDS % 60)) s"; done

test-long: install  ## what takes minutes for one thing: a node lost, servers gone, S3, a search, pages in a browser (chromium)
	$(BIN)/pytest tests -m long
	@$(MAKE) --no-print-directory mutants

mutants: install  ## which changes of the algorithms' code, and of a sample of the guards', does no test notice (40 minutes)
	$(BIN)/python tests/mutants.py

lint: style  ## style and types; the docs build without a warning
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types docs

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and mkdocs have one thread each, and tests wait for processes: together they leave no core idle.
checks: install
	@$(MAKE) --no-print-directory --jobs=3 --output-sync unit types docs

types: stubs
	nice $(BIN)/python .ci/tree.py mypy

docs: install  ## build the documentation into site/, offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html, or: $(BIN)/mkdocs serve"

audit-deps: install  ## known vulnerabilities of what is pinned
	$(BIN)/python .ci/audit_deps.py

unit: install  ## pure tests
	$(BIN)/pytest tests/unit -m "not long" -n auto --dist worksteal

component: install  ## one real engine each: Ray, DeepSpeed, vLLM, MLflow
	$(BIN)/pytest tests/component -m "not long" -n 2

lifecycle: install  ## the real command, whole and under injected faults
	$(BIN)/pytest tests/e2e -m "not long" -n 2

peers: install  ## the smallest model by X-ray and by TRL (10 minutes): prints who is faster, fails where the losses differ
	$(BIN)/python -m benchmarks.peers --only sft dpo grpo ppo --turns 1 --iterations 3

gpu-check: install  ## on a machine with a GPU: does every path that needs one work, and how fast (8 minutes)
	$(BIN)/python -m benchmarks.gpu_acceptance

clean:  ## remove the environment and every run
	rm -rf .venv runs site
