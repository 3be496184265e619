# `make test` and `make demo` need nothing but make and a Python >= 3.11: they build .venv on first use
# and again when pyproject.toml or constraints.txt changed.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.deltamesh-installed
EXTRAS := dev,demo
PYTHON ?= $(shell for name in python3.11 python3; do \
	if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo "$$name"; break; fi; done)

.DEFAULT_GOAL := help
.PHONY: help install lint format test demo bench clean

help:
	@echo "make install   build $(VENV) with the development tools"
	@echo "make lint      ruff, mypy and the import contracts"
	@echo "make format    rewrite the sources in the project's format"
	@echo "make test      lint, then every test"
	@echo "make demo      the demonstration, on this machine's CPU"
	@echo "make bench     every script of benchmarks/, one after another"
	@echo "make clean     remove $(VENV) and the tools' caches"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found as python3.11 or python3; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(f"{sys.executable} is Python {v[0]}.{v[1]}; deltamesh needs 3.11 or later: make PYTHON=/path/to/python3.11" if v < (3, 11) else 0)'
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $(STAMP)

install: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

demo: $(STAMP)
	$(BIN)/python examples/demo.py

bench: $(STAMP)
	@set -e; for script in $(wildcard benchmarks/[a-z]*.py); do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
