# make study: installs and runs the quickstart study.   make test: installs, then style, types and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUDY ?= experiments/quickstart.py
# A worker process a core, one thread each: the fastest split of small models on a CPU.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := study
.PHONY: study test lint bench clean

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than 3.11; give another: make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

study: $(INSTALLED)
	$(BIN)/gridlaw run $(STUDY)

test: lint
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m experiments.bench_mixers
	$(BIN)/python -m experiments.bench_hybrids
	$(BIN)/python -m experiments.bench_training

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
