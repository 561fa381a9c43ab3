# `make train` and `make test` need nothing but Linux x86-64, Python 3.11, 3.12
# or 3.13, or uv, and a package index.

# The Python that makes .venv; searched in PATH if not given.
PYTHON ?=
# The flagfile of `make train`.
FLAGFILE ?= configs/quickstart.flags
# More flags for `make train`, or options for pytest.
ARGS ?=
# How many processes run the tests, each up to 5 GB; 0: only pytest itself.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install --quiet --no-deps
SITE := build/site
# What is added to .venv by `make setup-PART`: requirements-PART.txt.
PARTS := dev flower gpu ray track
LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --annotation-style line --quiet \
	--custom-compile-command 'make lock' --output-file
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --durations=15

.DELETE_ON_ERROR:
.PHONY: help setup $(PARTS:%=setup-%) train test quick test-slow lint format \
	notebooks results docs dist lock clean

help:
	@echo 'make train       set up .venv, then train (ARGS="--flag=value ...",'
	@echo '                 FLAGFILE=$(FLAGFILE))'
	@echo 'make test        set up, check format, lint and types, run the tests'
	@echo 'make quick       run the tests that ARGS names: ARGS=tests/files_test.py'
	@echo 'make test-slow   set up, run the tests that take longer'
	@echo 'make lint        run only the checks'
	@echo 'make format      format the code, sort imports'
	@echo 'make setup       make .venv with everything that training needs'
	@echo 'make setup-dev   also install what the tests, checks and docs need'
	@echo 'make setup-gpu   also install the CUDA 12 libraries'
	@echo 'make setup-ray   also install Ray, for several machines'
	@echo 'make setup-track also install MLflow and Weights & Biases, to track runs'
	@echo 'make setup-flower  also install Flower, for federations'
	@echo 'make notebooks   run the notebooks of examples/, keep their outputs'
	@echo 'make results     write the tables of docs/results/ from their CSV files'
	@echo 'make docs        build the site of docs/ in $(SITE), check it'
	@echo 'make dist        build the wheel and the source distribution in dist'
	@echo 'make lock        update requirements*.txt (needs uv;'
	@echo '                 ARGS=--upgrade to take newer versions)'
	@echo 'make clean       remove .venv, build, caches'
	@echo 'PYTHON=/path/to/python3.12 chooses the Python that makes .venv.'

# An installation is repeated only if its files have changed.
# promise is built here, with the locked setuptools and wheel: pip's build
# isolation would use their newest versions. TensorFlow Federated says that it
# needs an older Python.
$(VENV)/.installed: requirements.txt pyproject.toml setup.py
	@if ! { $(BIN)/python -m pip --version && \
	        sh tools/find_python.sh $(BIN)/python; } >/dev/null 2>&1; then \
	  python=$$(sh tools/find_python.sh $(PYTHON)) || exit 1; \
	  echo "Making $(VENV) with $$python"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@echo 'Installing requirements.txt (3.0 GB; takes minutes)'
	@awk '/^[a-z]/ { take = /^(setuptools|wheel)==/ } take' requirements.txt \
	  >$(VENV)/build-requirements.txt
	@$(INSTALL) -r $(VENV)/build-requirements.txt
	@$(INSTALL) --no-build-isolation --ignore-requires-python \
	  -r requirements.txt
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-%: requirements-%.txt $(VENV)/.installed
	@echo 'Installing $<'
	@$(INSTALL) -r $<
	@touch $@

setup: $(VENV)/.installed
$(PARTS:%=setup-%): setup-%: $(VENV)/.installed-%

train: setup
	$(BIN)/python programs/train.py --flagfile=$(FLAGFILE) $(ARGS)

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint setup-ray setup-track
	$(PYTEST) $(ARGS)

quick: setup-dev
	$(BIN)/python -m pytest -q $(ARGS)

test-slow: setup-dev setup-flower setup-ray setup-track
	$(PYTEST) -m slow $(ARGS)

format: setup-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

notebooks: setup-dev
	$(BIN)/python tools/run_notebooks.py

results: setup-dev
	$(BIN)/python tools/results.py pages

# A broken link, or a page that is not in the navigation, fails.
docs: setup-dev
	PYTHONPATH=.:tools NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs \
	  build --strict --clean --site-dir $(SITE)
	@echo 'Read it: $(BIN)/python -m http.server --directory $(SITE)'

dist: setup
	$(BIN)/python -c "from setuptools import build_meta as build; \
	  build.build_sdist('dist'); build.build_wheel('dist')"

# All is resolved together, as it is installed, and each part of it written to a
# file, whose former content uv prefers. ARGS=--upgrade takes newer versions.
lock: setup
	@command -v uv >/dev/null || { echo 'make lock needs uv: pip install uv'; \
	  exit 1; }
	@mkdir -p build
	cat requirements*.txt >build/lock.txt
	$(LOCK) build/lock.txt $(ARGS) pyproject.toml --all-extras --group tff \
	  --group dev
	cp build/lock.txt requirements.txt
	$(LOCK) requirements.txt pyproject.toml --group tff
	for part in $(PARTS); do \
	  cp build/lock.txt requirements-$$part.txt; \
	  $(BIN)/python -c "import tomllib; \
	    file = tomllib.load(open('pyproject.toml', 'rb')); \
	    parts = file['dependency-groups'] \
	      | file['project']['optional-dependencies']; \
	    print(*parts['$$part'], sep='\n')" | \
	  $(LOCK) requirements-$$part.txt - $$(sed -nE \
	    '/win32/!s/^([a-z0-9-]+)==.*/--no-emit-package \1/p' \
	    requirements.txt) || exit 1; \
	done

clean:
	rm -rf $(VENV) *.egg-info build dist .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
