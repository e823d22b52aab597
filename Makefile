# Every target works from a bare checkout: it first makes .venv, then runs.
#
#   make test       lint, types and tests; the last line is pytest's summary
#   make quick      the tests that neither compile nor start a process: three minutes
#   make demo       train a small GPT on real text through a zero-bubble pipeline, in one process;
#                   make demo PROCESSES=2 with a process for each of its two ranks
#   make examples   run every file of examples/ whole
#   make hour       the first hour of a newcomer, from a clone in a fresh environment; 30 minutes
#   make soak       random schedules with random faults on real processes; ROUNDS=300 SEED=0
#   make programs   random programs against plain autograd; COUNT=1000 SEED=0
#   make models     Hugging Face models, compiled, against themselves without a pipeline
#   make layers     layers and operations of torch, compiled, against themselves uncompiled
#   make emulate    the tests of CUDA, on a device that is made of the CPU
#   make device     what only a GPU can show, in eight minutes; results in build/device
#   make docs       the site, with its notebooks executed and warnings as errors, in build/site
#   make release    build wheel and sdist into dist, and use both in fresh environments
#   make lint       ruff and mypy alone
#   make format     let ruff rewrite the files
#   make clean      remove .venv, the caches and build outputs
#
# PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Lies inside the environment, so that whoever deletes one deletes the other.
STAMP := $(VENV)/.installed

# How many processes `make demo` takes.
PROCESSES ?= 1
LAUNCH := $(if $(filter-out 1,$(PROCESSES)),$(BIN)/torchrun --standalone --nproc-per-node $(PROCESSES),$(BIN)/python)

# Processes that run tests; the tests of one file share theirs, with what it sets up. One that dies
# is not replaced, and ends the run: xdist 3.8 may wait for ever for a replaced one's files.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The tests start many processes, and each would read all of the source anew.
export PYTHONDONTWRITEBYTECODE :=

# How long `make soak` and `make programs` go on, and what they draw.
ROUNDS ?= 300
COUNT ?= 1000
SEED ?= 0

.PHONY: test quick demo examples hour soak programs models layers emulate device docs release lint format clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("fpipe needs Python 3.11 or newer; choose one with: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@# Python compiles what is imported, when it is: a small part of what is installed.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test,lint]'
	@touch $@

test: lint
	$(PYTEST)

quick: $(STAMP)
	$(PYTEST) -m "not inductor and not processes"

demo: $(STAMP)
	$(LAUNCH) examples/gpt.py

examples: $(STAMP)
	@set -e; for file in examples/*.py; do echo "== $$file"; $(BIN)/python $$file; done

hour:
	$(PYTHON) tests/first_hour/hour.py

soak: $(STAMP)
	$(BIN)/python -m tests.soak.soak --rounds $(ROUNDS) --seed $(SEED)

programs: $(STAMP)
	$(BIN)/python -m tests.programs --count $(COUNT) --seed $(SEED)

models: $(STAMP)
	$(BIN)/python -m tests.architectures

layers: $(STAMP)
	$(BIN)/python -m tests.layers --compiled

emulate: $(STAMP)
	$(BIN)/python -m pytest -p tests.device.emulated -m "cuda and not real_device"

device: $(STAMP)
	$(BIN)/python -m tests.device.campaign

release: $(STAMP)
	$(BIN)/python -m tests.release --output dist

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/site

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
