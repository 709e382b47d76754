# Everything that a contributor types. Each target makes what it needs in .venv, once.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The peers that we compare with. Installed without their dependencies: what of torchvision they
# use needs no compiled operator, and its wheels ask for a torch of their own.
PEERS := timm==1.0.31 torchvision==0.28.0
# These come with what they depend on.
WITH_DEPENDENCIES := transformers==5.23.0 scikit-learn==1.9.1

.PHONY: demo test test-slow golden roundtrips lint bench clean

# Classify a photograph that ships in the repository, with weights that do too.
demo: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/vit predict tests/images/cat.jpg

test: .venv/.test
	$(BIN)/python -m pytest

test-slow: .venv/.peers
	$(BIN)/python -m pytest -m "slow or peers"

# Every golden case: the largest difference from what the original computed, and its tolerance.
golden: .venv/.test
	$(BIN)/python tests/golden_table.py

# Every layout that is read, in every layout that is written: exact to the bit, or why not.
roundtrips: .venv/.test
	$(BIN)/python tests/roundtrip_table.py

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Speed beside the peers: whole processes, paired, medians and ratios.
bench: .venv/.peers
	$(BIN)/python tests/bench/run.py

clean:
	rm -rf .venv build dist

.venv/.made:
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.made pyproject.toml
	$(INSTALL) --editable .
	touch $@

.venv/.test: .venv/.made pyproject.toml
	$(INSTALL) --editable '.[test]'
	touch $@ .venv/.installed

.venv/.lint: .venv/.made pyproject.toml
	$(INSTALL) --editable '.[lint]'
	touch $@ .venv/.installed

.venv/.peers: .venv/.test Makefile
	$(INSTALL) --no-deps $(PEERS)
	$(INSTALL) $(WITH_DEPENDENCIES)
	touch $@
