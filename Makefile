# Set-up, tests and everything else; each target makes the virtual environment it needs, once.

VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One stamp per set of extras: set-up is done again when what is to be installed changes.
RUN_STAMP := $(VENV)/.installed-tutorials
TEST_STAMP := $(VENV)/.installed-test
FOREIGN_STAMP := $(VENV)/.installed-foreign
STORAGE_STAMP := $(VENV)/.installed-storage
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: quickstart test test-slow test-backends foreign lint types layers docs bench clean help

help:
	@echo "make quickstart   set up, and train a small network on two workers"
	@echo "make test         set up, and run the tests (test-slow: the long ones)"
	@echo "make test-backends set up an S3 server on this machine, and run the tests against it"
	@echo "make foreign      install what make test tries beside distsdk: Lightning, Accelerate, transformers, torchdata"
	@echo "make lint types layers docs bench clean"

quickstart: $(RUN_STAMP)
	$(BIN)/python tutorials/01_quickstart.py

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -m "not slow and not backends" $(PYTEST_ARGS)

test-slow: $(TEST_STAMP)
	$(BIN)/python -m pytest -m "slow and not backends" $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: none is marked

test-backends: $(STORAGE_STAMP)
	$(BIN)/python -m pytest -m backends $(PYTEST_ARGS)

foreign: $(FOREIGN_STAMP)

layers: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/test_layers.py $(PYTEST_ARGS)

lint: $(TEST_STAMP)
	$(BIN)/python -m ruff check .

types: $(TEST_STAMP)
	$(BIN)/python -m mypy

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/bench_launch.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_failure.py
	$(BIN)/python benchmarks/bench_checkpoint.py

clean:
	rm -rf $(VENV) site build dist distsdk_runs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[tutorials]"
	@touch $@

$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[test,tutorials]"
	@touch $@ $(RUN_STAMP)

$(FOREIGN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[test,tutorials,foreign]"
	@touch $@ $(TEST_STAMP) $(RUN_STAMP)

$(STORAGE_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[test,tutorials,storage]"
	@touch $@ $(TEST_STAMP) $(RUN_STAMP)

$(BENCH_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[tutorials,bench]"
	@touch $@ $(RUN_STAMP)

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@
