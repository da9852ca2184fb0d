# Every command of the project; CI calls these and nothing else. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := precis service workers tests benchmarks deploy

.DEFAULT_GOAL := help
.PHONY: help up test setup setup-test fmt lint types imports deploy-lint check test-redis test-chaos test-gpu bench bench-quality bench-codec bench-latency bench-throughput lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

up: setup  ## run everything on this machine: http://127.0.0.1:8000, Ctrl-C stops
	$(BIN)/precis up $(ARGS)

test: setup-test  ## run the whole default test suite
	$(BIN)/python -m pytest $(ARGS)

setup: $(VENV)/.installed  ## make .venv with the pinned packages
setup-test: $(VENV)/.installed-test  ## the same with what tests and linters need

# torch first and with its requirements: its wheel for Linux may want CUDA libraries that no lock for all machines can name.
$(VENV)/.installed: requirements.lock pyproject.toml hatch_build.py $(wildcard precis/native/*.cpp precis/native/*.h) precis/native/build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint requirements.lock "$$(grep ^torch== requirements.lock)"
	$(PIP) install --no-deps --requirement requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-test: requirements-test.lock $(VENV)/.installed
	$(PIP) install --no-deps --requirement requirements-test.lock
	touch $@

fmt:  ## format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint:  ## check format and rules
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types:  ## check types
	$(BIN)/mypy

imports:  ## check which package may import which
	$(BIN)/lint-imports

deploy-lint:  ## check Dockerfiles and docker-compose.yml
	$(BIN)/hadolint deploy/*.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

check: setup-test lint types imports deploy-lint test  ## all of it, as CI does

test-redis: setup-test  ## the suite against the redis-server on the PATH
	PRECIS_TEST_SERVER=redis-server $(BIN)/python -m pytest $(ARGS)

test-chaos: setup-test  ## kill and stop processes under load for a minute: ARGS="--seconds 600 --seed 3"
	$(BIN)/python -m pytest -m chaos -s tests/chaos $(ARGS)

test-gpu: setup-test  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

bench-quality: setup-test  ## measure what policies keep, e.g. make bench-quality ARGS="--ruler 2000 --out results.jsonl"
	$(BIN)/python -m benchmarks.quality run $(ARGS)

bench-codec: setup-test  ## measure codecs at equal bytes, e.g. make bench-codec ARGS="run --documents FOLDER --out F"
	$(BIN)/python -m benchmarks.codec $(ARGS)

bench: setup-test  ## measure latency and memory against the plain alternative
	$(BIN)/python -m benchmarks.latency $(ARGS)

bench-latency: setup-test  ## first tokens over stored documents, e.g. make bench-latency ARGS="--document F --llama D --out F"
	$(BIN)/python -m benchmarks.serving latency $(ARGS)

bench-throughput: setup-test  ## many streams at once, e.g. make bench-throughput ARGS="--document F --llama D --out F"
	$(BIN)/python -m benchmarks.serving throughput $(ARGS)

lock:  ## resolve the pinned packages anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --all-extras pyproject.toml -o requirements-test.lock
	uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --extra service --extra worker --extra embedded --extra build -c requirements-test.lock pyproject.toml -o requirements.lock

clean:  ## remove what was installed and cached
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
