# The same commands for people and for CI. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Where the real datasets lie, for the tests and recipes that use them. Nothing needs them to pass.
SHARED ?= ../shared
export MINBERT_HOME ?= $(HOME)/.cache/minbert
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: help quickstart test test-full check format bench docs clean
.DEFAULT_GOAL := help

help:  ## what there is
	@$(PYTHON) -c "import re; [print(f'  make {m[1]:12}{m[2]}') for m in re.finditer(r'^([a-z-]+):.*?## *(.*)', open('Makefile').read(), re.M)]"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) (once)"
	$(PIP) -e '.[train,report]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) for development (once)"
	$(PIP) -e '.[train,hub,parquet,report,serve,dev]'
	@touch $(VENV)/.train $@

$(MINBERT_HOME)/encoders/minilm/config.json: | $(VENV)/.train
	$(BIN)/minbert encoders get minilm

quickstart: $(VENV)/.train $(MINBERT_HOME)/encoders/minilm/config.json  ## set up, then the main job on embedded defaults
	$(BIN)/minbert quickstart

check: $(VENV)/.dev  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev check $(MINBERT_HOME)/encoders/minilm/config.json  ## set up, check, and the tests (at most 10 minutes on 2 cores)
	SHARED=$(SHARED) $(BIN)/pytest -n 2 --dist loadfile

test-full: $(VENV)/.dev $(MINBERT_HOME)/encoders/minilm/config.json  ## the slow, browser, distributed and fault tests; installs what they need
	VENV=$(VENV) SHARED=$(SHARED) bash .ci/prepare-full
	SHARED=$(SHARED) $(BIN)/pytest -m 'slow or browser or distributed or fault'

format: $(VENV)/.dev  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev $(MINBERT_HOME)/encoders/minilm/config.json  ## ours against the peers on this CPU, each in one run
	$(BIN)/python -m bench.optimizers
	SHARED=$(SHARED) $(BIN)/python -m bench.encode
	for part in train pairs heads scaling; do SHARED=$(SHARED) $(BIN)/python -m bench.$$part --device cpu || exit 1; done
	SHARED=$(SHARED) $(BIN)/python -m bench.serve --requests 2048
	$(BIN)/python -m bench.summary
	$(MAKE) docs

docs: $(VENV)/.dev  ## draw the figures and write the numbers of results/ into README.md and docs/
	$(BIN)/python -m bench.plots
	$(BIN)/python -m bench.numbers

clean:  ## remove what make created here
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
