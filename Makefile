# make run    set everything up and start the product with something to see in it
# make run-cluster  three servers on one PostgreSQL and one NATS behind HAProxy, and what to kill to see them take over
# make test   set everything up, lint, type-check and run all tests
# make quick  lint and the tests that start and open nothing
# make lint   ruff and mypy
# make faults the long form of what kills and starves servers: 20,000 simulated histories, 300 crashes, 30 takeovers, new examples
# make bench  the figures of docs/performance.md, each beside its reference
# make wheel  the wheels of both distributions in dist/
# make docs   the documentation as a site in dist/site
# make screenshots  pictures of the console in dist/screenshots, and the one of the README
# make audit  known vulnerabilities of the pinned dependencies
# make pins   write the requirements files anew, with hashes

SHELL := /bin/bash
# Hundreds of tests start a server; compiling every module anew each time would take most of their time.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
CONTRACTS := $(shell find proto -name '*.proto')
BUILD := hatch_build.py tools/protogen.py $(wildcard tools/console/*) tools/setup.sh $(CONTRACTS)

.PHONY: help run run-cluster test compiled quick lint style faults bench wheel docs screenshots audit pins clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Everything Python, anew when a contract, a dependency or a pin changes.
.make/env: pyproject.toml packages/fleetplane/pyproject.toml requirements-dev.txt $(BUILD)
	@tools/setup.sh python $(VENV)
	@mkdir -p .make && touch $@

# The system packages that tests and benchmarks need, and generators of clients.
.make/system-%: tools/setup.sh tools/clients/package-lock.json tools/console/package-lock.json tools/authority/requirements.txt tools/charts/requirements.txt
	@tools/setup.sh $*
	@mkdir -p .make && touch $@

# What running needs: a fifth of what developing needs, and nothing where that is there already.
.make/product: pyproject.toml packages/fleetplane/pyproject.toml requirements.txt $(BUILD)
	@[ -e .make/env ] && [ -z "$$(find $^ -newer .make/env)" ] || tools/setup.sh product $(VENV)
	@mkdir -p .make && touch $@

# Without NGINX everything else is still worth seeing. V=1 shows what everything logs.
run: .make/product
	@tools/setup.sh run || true
	@$(BIN)/fleetplane demo $(if $(V),-v)

# SHOW=1 demonstrates a takeover by itself, and ends.
run-cluster: .make/product
	@tools/setup.sh cluster
	@$(BIN)/python tools/run_cluster.py $(if $(SHOW),--show)

lint: style
	$(BIN)/mypy

style: .make/env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked in the time in which tests wait for something; what was found is printed after the tests. What
# every worker would do by itself is done once, before. What fails is run once more, alone: see tools/run_tests.py.
test: style
	@nice -n 5 $(BIN)/mypy >.make/types 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	$(MAKE) --no-print-directory -j 2 .make/system-test compiled && \
		(set -x; $(BIN)/python tools/run_tests.py -n 6 --dist worksteal); tests=$$?; \
	wait $$types; types=$$?; trap - EXIT; \
	echo $(BIN)/mypy; cat .make/types; \
	[ $$types = 0 ] || echo "make test: mypy failed, see above"; \
	[ $$tests = 0 ] || echo "make test: the tests failed, see above"; \
	[ $$tests$$types = 00 ]

compiled: .make/env
	@$(BIN)/python -m pytest --collect-only -q | tail -n 1

quick: .make/env lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick -q

# Some hours; the short forms are in `make test`.
faults: .make/env .make/system-test .make/system-faults
	CLUSTER_SEEDS=20000 AGENT_SEEDS=5000 CLUSTER_SHOWN=1 CLUSTER_KILLS=300 CLUSTER_FAILURES=48 CLUSTER_FAILURES_WITHOUT_BUS=20 CLUSTER_UPGRADES=30 AUTHORITY_SUCCESSIONS=5 CLUSTER_DAEMONS=3000 CLUSTER_RUNS=4 STANDBY_MISSING_SECONDS=60 CONTESTED_KEYS=1000 CONTESTED_TOKENS=1000 STORE_CRASH_ROUNDS=300 TAKEOVER_ROUNDS=30 FUZZ_EXAMPLES=100 $(BIN)/python -m pytest -q tests/faults \
		tests/kernel/store/test_cluster_simulation.py tests/kernel/commands/test_agents_simulation.py tests/kernel/store/test_servers_takeover.py tests/web/test_idempotency_servers.py tests/kernel/identity/test_enrolment_servers.py
	HYPOTHESIS_EXPLORE=1 $(BIN)/python -m pytest -q -m hypothesis
	PEBBLE=$(CURDIR)/.make/authority/pebble $(BIN)/python -m pytest -q tests/domains/proxies/acme
	HOLD_BACK=1 PYTHONPATH=$(CURDIR)/tests/support/held_back $(BIN)/python -m pytest -n 6 --dist worksteal -q

bench: .make/env .make/system-bench
	$(BIN)/python bench/run.py

# A wheel without the console's libraries is none to hand on.
wheel: .make/env
	@tools/setup.sh console
	$(BIN)/pip wheel --no-deps --no-build-isolation -w dist . ./packages/fleetplane

# Made by the test of the console; the README's is drawn anew, as SVG.
screenshots: .make/env .make/system-test
	CONSOLE_PICTURES=$(CURDIR)/dist/screenshots $(BIN)/python -m pytest -q tests/web/test_console_browser.py
	cp dist/screenshots/machines.svg docs/images/console.svg

# The site, in dist/site; a broken link or an unknown name is an error.
docs: .make/env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Say which pinned packages have known vulnerabilities, or that nobody could be asked.
audit: .make/audit
	@.make/audit/bin/python tools/audit.py

.make/audit: requirements-audit.txt
	@tools/setup.sh audit $@

# After a change of a dependency or a pin.
pins: .make/env
	@tools/pins.sh

clean:
	rm -rf $(VENV) .make dist src/fleetplane/gen src/fleetplane/web/files/libraries
