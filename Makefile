# Commands for contributors. Each target installs what it needs into .venv, once.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

# The libraries that the tests and benchmarks compare with. timm and torchvision go in without
# their dependencies: the parts of torchvision that are used need no compiled operators, and its
# wheels would replace torch.
PEERS := timm==1.0.31 torchvision==0.28.0
PEERS_WITH_DEPENDENCIES := transformers==5.23.0 scikit-learn==1.9.1 peft==0.21.2

# One process per core; a model in each of more than eight would take much memory.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: help demo lint test test-slow test-gpu bench bench-gpu golden roundtrips screens clean

help:
	@echo "make demo        install into .venv and classify a photograph"
	@echo "make test        run the quick tests, about 3 minutes on two cores"
	@echo "make lint        ruff, and mypy in strict mode"
	@echo "make test-slow   killed processes, fuzzing, and comparisons with timm and transformers"
	@echo "make bench       speed compared with timm, transformers and scikit-learn"
	@echo "make test-gpu    run the tests that need CUDA"
	@echo "make bench-gpu   training steps compared with timm's on a GPU"
	@echo "make golden      every golden case: largest difference from the original, and its tolerance"
	@echo "make roundtrips  every layout that is read, in every layout that is written: exact, or why not"
	@echo "make screens     rewrite tests/screens.txt: every help screen, and common errors"
	@echo "make clean       remove .venv and build products"

# Classify a photograph of this repository with the included weights, without the network.
demo: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/vit predict tests/images/cat.jpg
	@echo "To use vit in this shell: . $(BIN)/activate"

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/.test
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: .venv/.peers
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or peers"

# Whole processes, run in turns; prints medians and ratios.
bench: .venv/.peers
	$(BIN)/python tests/bench/run.py

test-gpu: .venv/.peers
	$(BIN)/python -m pytest -m gpu tests/train

bench-gpu: .venv/.peers
	PYTHONPATH=. $(BIN)/python tests/bench/gpu.py

golden: .venv/.test
	$(BIN)/python tests/test_golden.py

roundtrips: .venv/.test
	$(BIN)/python tests/test_roundtrips.py

screens: .venv/.test
	$(BIN)/python tests/screens.py

clean:
	rm -rf .venv build dist

.venv/.made:
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.made pyproject.toml
	@echo "Installing vit and its dependencies into .venv; torch is the largest"
	$(INSTALL) --editable .
	touch $@

.venv/.test: .venv/.made pyproject.toml
	@echo "Installing vit and what its tests need into .venv; torch is the largest"
	$(INSTALL) --editable '.[test]'
	touch $@ .venv/.installed

.venv/.lint: .venv/.made pyproject.toml
	$(INSTALL) --quiet --editable '.[lint]'
	touch $@ .venv/.installed

.venv/.peers: .venv/.test Makefile
	$(INSTALL) --quiet --no-deps $(PEERS)
	$(INSTALL) --quiet $(PEERS_WITH_DEPENDENCIES)
	touch $@
