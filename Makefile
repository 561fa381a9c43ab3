# `make train` and `make test` need nothing but Linux x86-64, Python 3.10 or
# 3.11 and a package index.

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
# TensorFlow Federated pins versions that are too old for the site's tools.
DOCS_VENV := .venv-docs
# Nor does what the machines of a federation need fit, see requirements-flower.in.
FLOWER_VENV := .venv-flower
FLOWER_LATEST_VENV := .venv-flower-latest
DOCS_BIN := $(DOCS_VENV)/bin
SITE := build/site
LOCK := uv pip compile --universal --python-version 3.10 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make lock' --quiet
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --durations=15

.DELETE_ON_ERROR:
.PHONY: help setup setup-dev setup-gpu setup-ray setup-track setup-flower \
	setup-flower-latest train test test-slow lint format notebooks results docs dist lock clean

help:
	@echo 'make train       set up .venv, then train (ARGS="--flag=value ...",'
	@echo '                 FLAGFILE=$(FLAGFILE))'
	@echo 'make test        set up, check format, lint and types, run the tests'
	@echo 'make test-slow   set up, run the tests that take longer'
	@echo 'make lint        run only the checks'
	@echo 'make format      format the code, sort imports'
	@echo 'make setup       make .venv with everything that training needs'
	@echo 'make setup-dev   also install what the tests and checks need'
	@echo 'make setup-gpu   also install the CUDA 11.8 libraries'
	@echo 'make setup-ray   also install Ray, for several machines'
	@echo 'make setup-track also install MLflow and Weights & Biases, to track runs'
	@echo 'make setup-flower  make .venv-flower, for the tests of federations'
	@echo 'make setup-flower-latest  the same with the latest Flower'
	@echo 'make notebooks   run the notebooks of examples/, keep their outputs'
	@echo 'make results     write the tables of docs/results/ from their CSV files'
	@echo 'make docs        build the site of docs/ in $(SITE), check it'
	@echo 'make dist        build the wheel and the source distribution in dist'
	@echo 'make lock        update requirements*.txt (needs uv;'
	@echo '                 ARGS=--upgrade to take newer versions)'
	@echo 'make clean       remove .venv, .venv-docs, .venv-flower*, build, caches'
	@echo 'PYTHON=/path/to/python3.11 chooses the Python that makes .venv.'

# An installation is repeated only if its files have changed.
# jax, sqlalchemy and promise are built here, with the locked setuptools and
# wheel: pip's build isolation would use their newest versions.
$(VENV)/.installed: requirements.txt pyproject.toml setup.py
	@python=$$(sh tools/find_python.sh $(PYTHON)) || exit 1; \
	if ! { $(BIN)/python -m pip --version && \
	       sh tools/find_python.sh $(BIN)/python; } >/dev/null 2>&1; then \
	  echo "Making $(VENV) with $$python"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@echo 'Installing requirements.txt (1.5 GB; takes minutes)'
	@awk '/^[a-z]/ { take = /^(setuptools|wheel)==/ } take' requirements.txt \
	  >$(VENV)/build-requirements.txt
	@$(INSTALL) -r $(VENV)/build-requirements.txt
	@$(INSTALL) --no-build-isolation -r requirements.txt
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@echo 'Installing requirements-dev.txt'
	@$(INSTALL) -r requirements-dev.txt
	@touch $@

$(VENV)/.installed-gpu: requirements-gpu.txt $(VENV)/.installed
	@echo 'Installing requirements-gpu.txt (2 GB)'
	@$(INSTALL) -r requirements-gpu.txt
	@touch $@

$(VENV)/.installed-ray: requirements-ray.txt $(VENV)/.installed
	@echo 'Installing requirements-ray.txt'
	@$(INSTALL) -r requirements-ray.txt
	@touch $@

$(VENV)/.installed-track: requirements-track.txt $(VENV)/.installed
	@echo 'Installing requirements-track.txt'
	@$(INSTALL) -r requirements-track.txt
	@touch $@

$(DOCS_VENV)/.installed: requirements-docs.txt
	@python=$$(sh tools/find_python.sh $(PYTHON)) || exit 1; \
	echo "Making $(DOCS_VENV) with $$python"; \
	"$$python" -m venv --clear $(DOCS_VENV)
	@echo 'Installing requirements-docs.txt'
	@$(DOCS_BIN)/python -m pip --disable-pip-version-check --no-input \
	  install --quiet --no-deps -r requirements-docs.txt
	@touch $@

# Without this package: tests run the sources.
define install-flower
	@python=$$(sh tools/find_python.sh $(PYTHON)) || exit 1; \
	echo "Making $(@D) with $$python"; \
	"$$python" -m venv --clear $(@D)
	@echo 'Installing $< (1 GB; takes minutes)'
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input \
	  install --quiet --no-deps -r $<
	@touch $@
endef

$(FLOWER_VENV)/.installed: requirements-flower.txt
	$(install-flower)

$(FLOWER_LATEST_VENV)/.installed: requirements-flower-latest.txt
	$(install-flower)

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev
setup-gpu: $(VENV)/.installed-gpu
setup-ray: $(VENV)/.installed-ray
setup-track: $(VENV)/.installed-track
setup-flower: $(FLOWER_VENV)/.installed
setup-flower-latest: $(FLOWER_LATEST_VENV)/.installed

train: setup
	$(BIN)/python programs/train.py --flagfile=$(FLAGFILE) $(ARGS)

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint setup-ray setup-track
	$(PYTEST) $(ARGS)

test-slow: setup-dev setup-ray setup-track
	$(PYTEST) -m slow $(ARGS)

format: setup-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

notebooks: setup-dev
	$(BIN)/python tools/run_notebooks.py

results: setup-dev
	$(BIN)/python tools/results.py pages

# A broken link, or a page that is not in the navigation, fails.
docs: $(DOCS_VENV)/.installed
	PYTHONPATH=.:tools NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/python -m mkdocs \
	  build --strict --clean --site-dir $(SITE)
	@$(DOCS_BIN)/python tools/check_site.py $(SITE)
	@echo 'Read it: $(DOCS_BIN)/python -m http.server --directory $(SITE)'

dist: setup
	$(BIN)/python -c "from setuptools import build_meta as build; \
	  build.build_sdist('dist'); build.build_wheel('dist')"

lock:
	@command -v uv >/dev/null || { echo 'make lock needs uv: pip install uv'; \
	  exit 1; }
	$(LOCK) $(ARGS) --override requirements-overrides.txt requirements.in \
	  --output-file requirements.txt >/dev/null
	@{ echo '# requirements.txt without hashes, which pip would demand of the'; \
	  echo "# package's own wheel, too. Made by make lock."; \
	  sed -E '/^ *(--hash|#)/d; s/ \\$$//' requirements.txt; } >constraints.txt
	$(LOCK) $(ARGS) requirements-dev.in --output-file requirements-dev.txt \
	  >/dev/null
	$(LOCK) $(ARGS) requirements-gpu.in --output-file requirements-gpu.txt \
	  >/dev/null
	$(LOCK) $(ARGS) --override requirements-overrides.txt \
	  requirements-ray.in --output-file requirements-ray.txt >/dev/null
	$(LOCK) $(ARGS) requirements-track.in --output-file \
	  requirements-track.txt >/dev/null
	$(LOCK) $(ARGS) requirements-docs.in --output-file \
	  requirements-docs.txt >/dev/null
	$(LOCK) $(ARGS) requirements-flower.in --output-file \
	  requirements-flower.txt >/dev/null
	$(subst 3.10,3.11,$(LOCK)) $(ARGS) requirements-flower-latest.in \
	  --output-file requirements-flower-latest.txt >/dev/null

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(FLOWER_VENV) $(FLOWER_LATEST_VENV) *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
