# make setup   build .venv with everything for running and testing
# make demo    tune the example model and show it live (ARGS=--exit: end by itself)
# make test    set up all that the tests need and run them (ARGS="tests/engine -x": part of them)
# make coverage  lines of engine/ that its tests run, in all their processes; fails under 95 % (ARGS="-x": to pytest)
# make check   linters, types, architecture rules
# make bench-engine   the engine beside DDP, FSDP2 and DeepSpeed (JSON=FILE: results as data too; ARGS=--help: options)
# make bench-NAME   zero_memory, communication, overhead, checkpointing, trial_cost, gpu, predict, search, stability (options: same)
# make clean   remove .venv, .venv-peers and caches; keeps data/

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

ARGS ?=
JSON ?=
BIN := .venv/bin

.PHONY: help setup system demo test coverage check bench-engine clean

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

coverage: setup system
	@$(BIN)/coverage erase
	@PYTHONPATH="$(CURDIR)/.ci/coverage" $(BIN)/python -m pytest tests/engine tests/contracts $(ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench-engine: setup .venv-peers/.complete
	@.venv-peers/bin/python -m benchmarks.peers $(if $(JSON),--json "$(JSON)") $(ARGS)

bench-%: setup
	@$(BIN)/python -m benchmarks.$* $(if $(JSON),--json "$(JSON)") $(ARGS)

.venv-peers/.complete: pyproject.toml constraints.txt .ci/peers benchmarks/peers/heap_counter.c | .venv/.complete
	@.ci/peers
	@touch $@

clean:
	rm -rf .venv .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
