# make run    set everything up and start the product with something to see in it
# make test   set everything up, lint, type-check and run all tests
# make lint   ruff and mypy
# make bench  the figures of docs/performance.md, each beside its reference
# make wheel  a wheel in dist/

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
CONTRACTS := $(shell find proto -name '*.proto')

.PHONY: help run test lint bench wheel clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Everything Python, anew when a contract, a dependency or a pin changes.
.make/env: pyproject.toml constraints.txt hatch_build.py tools/protogen.py tools/setup.sh $(CONTRACTS)
	@tools/setup.sh python $(VENV)
	@mkdir -p .make && touch $@

# The system packages that tests and benchmarks need.
.make/system-%: tools/setup.sh
	@tools/setup.sh $*
	@mkdir -p .make && touch $@

# Without NGINX everything else is still worth seeing; the script says how to get it.
run: .make/env
	@tools/setup.sh run || true
	@tools/run.sh $(BIN)

lint: .make/env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .make/env .make/system-test lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

bench: .make/env .make/system-bench
	$(BIN)/python bench/run.py

wheel: .make/env
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) .make dist src/fleetplane/gen
