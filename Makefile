# Everything a fresh machine needs: Python 3.11, make and a C++ compiler.
#   make demo     a whole RLHF lifecycle (installs first)
#   make test     every part, and one whole lifecycle under six blows
# EXTRA=cuda installs the CUDA builds instead of the CPU ones.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

EXTRA ?= cpu
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRA)

.PHONY: help install demo test test-long lint docs audit-deps unit component lifecycle mutants clean

help:  ## show this
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## install into .venv (once; again after pyproject.toml or constraints.txt changed)

# uv does not read pip's find-links; where that variable is set it is passed on. Byte code is compiled here since every
# Ray actor is a process that imports torch or vLLM: without it (PYTHONDONTWRITEBYTECODE) each takes twice as long.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v == (3, 11) else f"Python 3.11 is needed, not {v[0]}.{v[1]}; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv==0.13.8'
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" $(BIN)/uv pip install --quiet --python $(BIN)/python \
		$(if $(filter cpu,$(EXTRA)),--constraint constraints.txt) --editable '.[$(EXTRA),dev]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib > .venv/compileall.log || true
	@touch $@

demo: install  ## run the quickstart lifecycle into runs/quickstart
	$(BIN)/xray run configs/quickstart.yaml

test: install lint audit-deps unit component lifecycle  ## style and types, dependencies, unit, component and end-to-end tests

test-long: install  ## what takes minutes for one thing: a node lost, servers gone, S3, a search, pages in a browser (chromium)
	$(BIN)/pytest tests -m long
	@$(MAKE) --no-print-directory mutants

mutants: install  ## which changes of the algorithms' code, and of a sample of the guards', does no test notice (40 minutes)
	$(BIN)/python tests/mutants.py

lint: install  ## style and types; the docs build without a warning
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory docs

docs: install  ## build the documentation into site/, offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html, or: $(BIN)/mkdocs serve"

audit-deps: install  ## known vulnerabilities of what is pinned
	$(BIN)/python .ci/audit_deps.py

unit: install  ## pure tests
	$(BIN)/pytest tests/unit -n auto

component: install  ## one real engine each: Ray, DeepSpeed, vLLM, MLflow
	$(BIN)/pytest tests/component -m "not long" -n 2 --dist worksteal

lifecycle: install  ## the real command, whole and under six blows
	$(BIN)/pytest tests/e2e -m "not long" -n 2 --dist loadfile

clean:  ## remove the environment and every run
	rm -rf .venv runs site
