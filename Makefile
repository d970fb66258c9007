# make demo   creates .venv, installs, and runs the whole workflow on the CPU with the demo data
# make test   creates .venv, installs, and runs the tests but the exhaustive ones
# make test-all   the exhaustive tests as well: every example from its first rule to its report, and more
# make test-pythons   the unit tests with Python 3.12 and 3.13, each in an environment of its own; without one it says so
# make test-torch211   the tests of models with torch 2.11, the oldest that is supported, in an environment of its own
# make test-trainers   other trainers' own parsers read emitted plans; installs these, without what they depend on
# make test-wheel   the wheel in an environment that was empty runs the demo to its report, in some eight minutes
# make test-slurm   runs the workflow on a small Slurm of its own, which it installs from Debian's packages
# make test-gpu   checks that one GPU decides, in 30 minutes; without a GPU it says which (docs/how-to/first-hour.md)
# FUZZ_SECONDS=600 make fuzz   reads damaged files of every kind, ten minutes for each test of tests/hostile
# make screenshots   pictures of the demo's report, as a laptop and a phone show it, into results/demo/screenshots
# make dist   builds the wheel and the source package into dist/: the same bytes from the same commit
# make docs   builds the pages of docs/ into docs/_build; open docs/_build/index.html
# make what-if   makes docs/_build/what-if.html, one file that answers for models, cards and numbers searched before
# make lock   writes requirements.lock: the versions of constraints.txt with the hashes of their files
# make lint   checks the code's and the workflow's form
PYTHON ?= python3
VENV ?= .venv
CORES ?= 2
BIN := $(VENV)/bin
INSTALL ?= $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Whole files, the longest first, as tests/conftest.py orders them.
PYTEST := pytest -q -n $(CORES) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed
OLD := .venv-torch211

export PATH := $(abspath $(BIN)):$(PATH)
export HF_HUB_OFFLINE := 1

.PHONY: setup demo test test-unit test-serial test-all test-pythons test-torch211 test-slurm test-gpu fuzz screenshots
.PHONY: test-trainers test-wheel dist docs what-if lock lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dflop needs Python 3.11 or newer; name one with: make PYTHON=python3.11 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt -e '.[dev,docs,slurm]'
	touch $@

demo: setup
	snakemake --cores $(CORES)
	@echo "Done: open results/demo/report/index.html; docs/reference/files.md says what else lies in results/demo"

# Tests that start processes wait for these: beside each other, the two kinds leave no core without work.
test: setup
	$(PYTEST) -m "not exhaustive" --ignore tests/slurm

test-unit: setup
	$(PYTEST) -m "not serial and not exhaustive"

test-serial: setup
	$(PYTEST) -m "serial and not exhaustive" tests/workflow tests/distributed

test-all: test
	$(PYTEST) -m exhaustive
	$(MAKE) test-torch211
	$(MAKE) test-trainers
	$(MAKE) test-pythons

test-pythons:
	@for version in 3.12 3.13; do \
	  if python$$version -c '' 2> /dev/null; then \
	    $(MAKE) test-unit PYTHON=python$$version VENV=.venv$$version || exit 1; \
	  else echo "python$$version is not here: nothing was tested with it" >&2; fi; \
	done

# Where pip knows no build of torch for CPUs alone, it downloads the one with CUDA.
test-torch211: $(OLD)/.installed
	$(OLD)/bin/python -m pytest -q -n $(CORES) --dist loadfile tests/unit/models tests/unit/base/test_leaving.py \
	  tests/unit/train/test_groups.py tests/distributed/test_unused_parameters.py

$(OLD)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLD)
	sed 's/^torch==.*/torch==2.11.0/' constraints.txt > $(OLD)/constraints.txt
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLD)/constraints.txt -e '.[dev]'
	touch $@

# The releases that dflop/search/emitters names.
.trainers: tests/unit/search/trainers.txt | setup
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --upgrade --target $@ -r $<
	touch $@

test-trainers: .trainers
	pytest -q tests/unit/search/test_trainers_parsers.py

# Installs the wheel into an environment of its own, and runs the demo there.
test-wheel: setup
	pytest -q -m exhaustive tests/workflow/test_packaging.py

test-slurm: setup
	tests/slurm/install.sh
	pytest -q tests/slurm

test-gpu: setup
	python -m tests.gpu

fuzz: export FUZZ_SECONDS ?= 60
fuzz: export FUZZ_SEED ?= $(shell date +%s)
fuzz: setup
	$(PYTEST) --dist load --timeout 0 -rP tests/hostile

screenshots: setup
	python tests/browser.py results/demo/report/index.html results/demo/screenshots

# The time of the commit stands in both, not that of the build.
dist: setup
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) hatchling build -d dist
	cd dist && sha256sum *

docs: what-if
	sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build

what-if: setup
	python docs/what_if.py

# The lines before the first package say how to install by the lock; uv's own comments name the package that asks.
lock: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	sed -n '/^[^#]/q;p' requirements.lock > requirements.lock.new
	uv pip compile pyproject.toml --extra slurm -c constraints.txt --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --no-header --no-emit-index-url --quiet >> requirements.lock.new || \
	  { rm requirements.lock.new; exit 1; }
	mv requirements.lock.new requirements.lock

lint: setup
	ruff check
	ruff format --check
	snakefmt --check workflow
	snakemake --lint

clean:
	rm -rf $(VENV) $(OLD) .venv3.12 .venv3.13 .trainers .snakemake docs/_build docs/generated results/demo results/demo-data
