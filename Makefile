# Both of these work on a fresh Linux machine with Python >= 3.11:
#   make demo     a model that looks fine and is not: the fault, its evidence, the page
#   make test     every check: lint, types, tests, examples in docstrings and README
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
OLDEST := $(VENV)/transformers-4
JOBS ?= 2
TORCHES ?= '==2.10.*' '>=2.10'
# The tests start many processes: each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo explore test thinned quick test-all check oldest bench docs lint types wheel clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

# What a user installs. torch comes first and from the constraints file: the package itself would take any newer build.
# Without a C++ compiler the package installs without its kernels.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/normkit/kernels/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -r constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation -e .
	@touch $@

# What the checks need on top.
# timm comes alone: of it only the files of its norms are tested, and it asks for a torchvision built for CUDA.
$(DEVELOPED): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "normkit[all]" --group dev
	$(BIN)/python -m pip install --quiet --no-deps timm==1.0.31
	@touch $@

# The oldest transformers that the package takes, beside the newest; `kernels` of that time, as it imports it.
$(OLDEST)/.installed: Makefile $(DEVELOPED)
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $(OLDEST) \
		transformers==4.57.6 huggingface-hub==0.36.2 kernels==0.10.5 tokenizers==0.22.2
	@touch $@

# MLX and JAX for the recipes in examples/: 530 MB, of which `make test` needs nothing.
$(VENV)/.runtimes: pyproject.toml $(DEVELOPED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group runtimes
	@touch $@

demo: $(STAMP)  ## a model that looks fine and is not: the fault, its evidence, the page
	$(BIN)/normkit inspect

explore: $(STAMP)  ## write the explorer of the geometry, one offline page, and open it
	$(BIN)/normkit explore

# Each test process computes with one thread: two beside each other would wait for cores more than they compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# mypy and the tests run side by side: neither keeps both cores busy.
test: lint $(DEVELOPED)  ## every check that a change needs: lint, types, tests, examples (under 6 minutes on 2 cores)
	@$(MAKE) --no-print-directory -j2 types thinned

check: lint $(DEVELOPED)  ## lint, types and the quick tests, while you work (under 2 minutes)
	@$(MAKE) --no-print-directory -j2 types quick

# pytest rewrites assertions to show their values, which is half of what a process of a fresh clone takes to collect the
# tests (20 of 42 s): only those that failed are run again with it.
quick: CHOICE := -m "not slow and not browser"
thinned quick: $(DEVELOPED)
	$(PYTEST) -p thinned $(CHOICE) --assert=plain || \
		{ $(PYTEST) -p thinned $(CHOICE) --last-failed --last-failed-no-failures none; exit 1; }

test-all: lint types oldest $(VENV)/.runtimes  ## the exhaustive products on top, for a night or a release (under 40 minutes)
	$(PYTEST)

bench: $(DEVELOPED)  ## measure what the README states, on an idle machine (20 minutes)
	@mkdir -p benchmarks/results
	$(BIN)/normkit bench --pass forward --pass forward-out --pass forward+backward --seconds 0.4 --json > benchmarks/results/norms.json
	$(BIN)/python benchmarks/llama.py --json > benchmarks/results/llama.json
	$(BIN)/python benchmarks/bars.py
	$(BIN)/python benchmarks/norms_table.py
	$(BIN)/python benchmarks/probe_overhead.py
	$(BIN)/python benchmarks/geometry_scaling.py
	$(BIN)/python benchmarks/rms_against_layer.py
	$(BIN)/python benchmarks/explorer.py
	$(BIN)/python benchmarks/watch_overhead.py --rounds 20 --wide-rounds 3
	$(BIN)/python benchmarks/folding.py --size 2 --shard 0.5 --rounds 1

# What builds the site is installed here alone: no test needs it but that of the whole site.
$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

docs: $(VENV)/.docs-installed  ## build the site in build/site; a dead link is an error
	$(BIN)/python docs/building/build_site.py
	$(BIN)/zensical build --clean --strict
	$(BIN)/python docs/building/built_site.py

oldest: $(OLDEST)/.installed  ## the tests of what depends on transformers, with the oldest that the package takes
	PYTHONPATH=$(abspath $(OLDEST)) $(PYTEST) tests/test_transformers.py

wheel: $(DEVELOPED)  ## dist/: the source archive and the wheel for Linux, proved beside the oldest torch and the newest (gigabytes)
	$(BIN)/python -m pip install --quiet --group release
	.ci/wheel $(BIN)/python $(TORCHES)

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEVELOPED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build .cache dist src/*.egg-info src/normkit/kernels/_cpu.*
