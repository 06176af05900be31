# make demo    train on real images, in .venv unless an environment is active
# make test    run the tests; PYTEST_ARGS='-k name' narrows them
# make test-downstream    compare with the packages of OpenMMLab, in an environment of their own
# make lint    check style
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
ENV := $(or $(ACTIVE),$(CURDIR)/.venv)
PYTHON := $(ENV)/bin/python
BASE_PYTHON ?= $(firstword $(shell command -v python3.11 python3))
PIP_INSTALL := $(PYTHON) -m pip install --constraint constraints.txt
INSTALL_INPUTS := setup.py pyproject.toml constraints.txt $(wildcard requirements/*.txt)
DOWNSTREAM_ENV ?= $(ENV)-downstream
DOWNSTREAM_PYTHON := $(DOWNSTREAM_ENV)/bin/python
# The stamps lie in the environment that they speak of.
DEMO_INSTALLED := $(ENV)/.mmprefetch-demo
TESTS_INSTALLED := $(ENV)/.mmprefetch-tests
DOWNSTREAM_INSTALLED := $(DOWNSTREAM_ENV)/.mmprefetch-downstream

# The images are small: torch's threads would wait for each other longer than they compute.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-downstream lint
.DELETE_ON_ERROR:

demo: $(DEMO_INSTALLED)
	$(PYTHON) tools/prepare_demo_data.py
	$(PYTHON) tools/train.py configs/demo/digits_prefetch.py --work-dir work_dirs/digits_prefetch
	$(PYTHON) tools/summarize_run.py work_dirs/digits_prefetch

test: $(DEMO_INSTALLED) $(TESTS_INSTALLED)
	$(PYTHON) -m pytest $(PYTEST_ARGS)

test-downstream: $(DOWNSTREAM_INSTALLED)
	$(DOWNSTREAM_PYTHON) -m pytest $(PYTEST_ARGS) tests/test_downstream

lint: $(TESTS_INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# An environment that already has mmengine and mmcv keeps them: they may come from a fork, and two
# packages that write the same folders damage each other.
$(DEMO_INSTALLED): $(INSTALL_INPUTS) | $(PYTHON)
	$(PYTHON) -c 'import mmengine, mmcv' 2>/dev/null || $(PIP_INSTALL) -r requirements/mminstall.txt
	$(PIP_INSTALL) --editable '.[demo]'
	touch $@

$(TESTS_INSTALLED): $(INSTALL_INPUTS) | $(PYTHON)
	$(PIP_INSTALL) -r requirements/tests.txt
	touch $@

# Torch first: what torchvision asks for is then there, and not replaced by a build for CUDA.
$(DOWNSTREAM_INSTALLED): $(INSTALL_INPUTS)
	$(BASE_PYTHON) -m venv $(DOWNSTREAM_ENV)
	$(DOWNSTREAM_PYTHON) -m pip install "$$(grep '^torch==' requirements/downstream.txt)"
	$(DOWNSTREAM_PYTHON) -m pip install -r requirements/downstream.txt
	$(DOWNSTREAM_PYTHON) -m pip install --no-deps -r requirements/downstream_nodeps.txt
	$(DOWNSTREAM_PYTHON) -m pip install --no-deps --editable .
	touch $@

$(CURDIR)/.venv/bin/python:
	$(BASE_PYTHON) -m venv $(CURDIR)/.venv
