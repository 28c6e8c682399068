# make setup   build .venv with everything for running and testing
# make demo    tune the example model and show it live (ARGS=--exit: end by itself)
# make test    set up all that the tests need and run them (ARGS="tests/engine -x": part of them)
# make check   linters, types, architecture rules
# make clean   remove .venv and caches; keeps data/

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

ARGS ?=
BIN := .venv/bin

.PHONY: help setup system demo test check clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt .ci/venv
	@.ci/venv
	@touch $@

system:
	@.ci/system

demo: setup
	@$(BIN)/python examples/demo.py $(ARGS)

test: setup system
	@$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
