# Everything a checkout can do. Needs git, make and Python 3.10 or newer with its venv module; the
# rest is set up in .venv by the first target that wants it. `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
ARGS   ?=

# Most of what a test does is to wait, so that each core has work for two and more; each worker of
# the run has servers of its own, and they need memory: not more than six.
JOBS ?= $(shell n=$$(( $$(nproc 2>/dev/null || echo 2) * 5 / 2 )); \
	if [ "$$n" -gt 6 ]; then n=6; fi; echo "$$n")

# A venv is bound to the folder it was made in and to its Python; it is made again when one of them
# has changed. A stamp is written last: a venv that failed half way leaves a folder with a
# bin/python in it, which must not count.
KEY   := $(shell { pwd; $(PYTHON) -V; } 2>&1 | cksum | cut -d' ' -f1)
MADE  := $(VENV)/.made-$(KEY)
CORE  := $(VENV)/.core-$(KEY)
TEST  := $(VENV)/.test-$(KEY)
LINT  := $(VENV)/.lint-$(KEY)
WORKS := $(shell $(VENV)/bin/python -c 'print("yes")' 2>/dev/null)
PIP   := $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help demo test long lint lint-ruff lint-format lint-types lint-imports lint-changes \
	docs wheel bench soak clean prerequisites again

help: ## this list
	@echo 'make TARGET [PYTHON=python3.12] [ARGS="..."]'
	@sed -n 's/^\([a-z]*\):.*## /  \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-10s %s\n", $$1, $$2}'

demo: $(CORE) ## a short show: a worker is killed, its job goes on elsewhere
	@$(VENV)/bin/python -m celery lease demo $(ARGS)

test: $(TEST) ## the tests (ARGS="-k expire -x" goes to pytest)
	@$(VENV)/bin/python -m tests.support.prepare
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not long" $(ARGS)

long: $(TEST) ## the tests that take minutes
	@$(VENV)/bin/python -m tests.support.prepare
	CELERY_LEASE_TEST_EXEC=1 $(VENV)/bin/python -m pytest -n $(JOBS) -m long $(ARGS)
	CELERY_LEASE_LONG=1 $(VENV)/bin/python -m pytest -n $(JOBS) -m "not long" tests/store tests/model $(ARGS)

lint: lint-ruff lint-format lint-types lint-imports lint-changes docs wheel ## all checks that run no test

lint-ruff: $(LINT)
	$(VENV)/bin/python -m ruff check .

lint-format: $(LINT)
	$(VENV)/bin/python -m ruff format --check .

lint-types: $(LINT)
	$(VENV)/bin/python -m mypy --strict celery_lease

lint-imports: $(LINT)
	$(VENV)/bin/lint-imports

lint-changes: $(LINT)
	@said=$$($(VENV)/bin/python -m towncrier build --draft --version next 2>&1) || \
		{ echo "$$said" >&2; exit 1; }

docs: $(LINT) ## the documentation, into docs/_build/html
	$(VENV)/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

# Built, installed beside nothing but what it declares, and asked for its version from elsewhere.
wheel: $(LINT) ## the wheel and the sdist, into dist/, and a look whether the wheel works
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist . >/dev/null
	$(VENV)/bin/python -m tests.support.wheel dist

bench: $(TEST) ## the measurements of bench/ (ARGS="--help")
	@$(VENV)/bin/python -m tests.support.prepare
	$(VENV)/bin/python -m bench $(ARGS)

# MINUTES (15), SEED (1), BROKER (redis, rabbitmq) and STORE (postgresql, mariadb, sqlite).
soak: $(TEST) ## chaos for 15 minutes (MINUTES=, SEED=, BROKER=, STORE=), report in docs/soak/
	@$(VENV)/bin/python -m tests.support.prepare
	MINUTES="$(MINUTES)" SEED="$(SEED)" BROKER="$(BROKER)" STORE="$(STORE)" \
		$(VENV)/bin/python -m tests.soak $(ARGS)

clean: ## remove what make made
	rm -rf $(VENV) build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------

APT := sudo apt-get install -y git make python3 python3-venv

prerequisites:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo 'celery-lease needs Python 3.10 or newer as "$(PYTHON)"; found: '"$$($(PYTHON) -V 2>&1)" >&2; \
		echo 'On Debian or Ubuntu:  $(APT)' >&2; \
		echo 'Another one:          make PYTHON=/path/to/python3 ...' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo '$(PYTHON) cannot make a venv: installing python3-venv'; \
			apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv \
				>/dev/null && $(PYTHON) -c 'import ensurepip, venv'; \
		else false; fi; } || { \
		echo '$(PYTHON) cannot make a virtual environment (ensurepip or venv is missing).' >&2; \
		echo 'On Debian or Ubuntu:  $(APT)' >&2; exit 2; }

$(MADE): $(if $(WORKS),,again) | prerequisites
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo 'The venv could not be made: see above. Then: make clean, and again.' >&2; exit 2; }
	@$(VENV)/bin/python -m pip --version >/dev/null || { \
		echo '$(VENV) has no working pip: is python3-venv complete?  $(APT)' >&2; exit 2; }
	@touch $@

again:

$(CORE): $(MADE) pyproject.toml
	@echo 'installing celery-lease and what its command line needs into $(VENV)'
	@$(PIP) --editable '.[cli]'
	@touch $@

$(TEST): $(MADE) pyproject.toml
	@echo 'installing celery-lease and what the tests need into $(VENV)'
	@$(PIP) --editable '.[test]'
	@touch $(CORE) $@

$(LINT): $(MADE) pyproject.toml
	@echo 'installing the linters and the documentation tools into $(VENV)'
	@$(PIP) --editable '.[docs,lint,cli,mysql,postgres,redis]'
	@touch $(CORE) $@
