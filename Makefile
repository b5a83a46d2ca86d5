# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PROFILE ?= ci
# Without PYTHON=..., a finished .venv of any supported Python is kept.
SETUP := $(PYTHON) scripts/setup.py $(if $(filter file,$(origin PYTHON)),--any-python)

# The slowest tests are listed at the end.
PYTEST := $(BIN)/pytest --durations 25 --durations-min 10

# The extras that tests without servers need: every connector but Spark and Ray, which take 0.7 GB.
TESTED := platform dev aws cassandra export kafka optuna

# Some containers set this variable; every process would then compile each imported module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-backends check bench card constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## create .venv with the platform (does nothing if nothing changed)
	@$(SETUP) platform

demo: setup  ## run the closed loop: people play, a learner learns, its bots play
	@$(BIN)/understudy demo --check

test:  ## run every test that needs no external server
	@$(SETUP) $(TESTED)
	$(PYTEST) -n 2

test-backends:  ## run every test that needs real servers; PROFILE=full adds repetitions
	@$(SETUP) $(TESTED) examples ray servers spark
	@$(BIN)/understudy dev servers fetch || echo "  tests of missing servers are skipped"
	$(PYTEST) -n 2 -m "backends$(if $(filter full,$(PROFILE)),, and not slow)" tests/integration

check:  ## check format, lint, types and imports
	@$(SETUP) $(TESTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# Exit code 1 of mypy is an error in our code; another means that its workers did not start, as on a busy machine.
	$(BIN)/mypy --num-workers 2 || { test $$? -ne 1 && $(BIN)/mypy; }
	$(BIN)/lint-imports --no-logo

bench:  ## measure every figure of docs/figures.md, ours and those of peers
	@$(SETUP) $(TESTED) bench servers spark
	$(BIN)/python bench/experience.py
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/crowd.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/engines.py
	$(BIN)/python bench/backends.py
	$(BIN)/python bench/learning.py
	$(BIN)/python bench/score_statistics.py
	$(BIN)/python bench/tune.py
	@# About an hour: ten studies of a minute with each of three systems.
	$(BIN)/python bench/tune_quality.py
	$(BIN)/python bench/lanes.py
	$(BIN)/python bench/run.py all
	@# Hours: 27 runs; a run that was measured with this commit is kept.
	$(BIN)/python bench/players.py loop
	@# More than an hour: ten loops of 400 s; kept in the same way.
	$(BIN)/python bench/candidates.py
	@# Hours: four games, five or six algorithms each, three seeds; kept in the same way.
	$(BIN)/python bench/offline_peers.py

card:  ## run the reliability card, in minutes; PROFILE=full takes an hour
	@$(SETUP) platform dev
	$(BIN)/python scripts/card.py --profile $(PROFILE)

constraints: setup  ## refresh constraints.txt, the pinned versions of all packages
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade --quiet \
	  --no-emit-index-url --no-annotate --custom-compile-command "make constraints" --output-file constraints.txt

clean:  ## remove .venv, caches, peers and build results
	rm -rf bench/.peers .venv .setup.lock build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests scripts bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
