# Every target first installs what it needs into .venv, unless it is installed already.
PYTHON ?= python3
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow newcomer check docs wheel graph-study clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: .venv/.demo  ## train a small LipsFormer on real handwritten digits (about 3 minutes on 2 cores)
	$(PY) train.py --config configs/demo.yaml

test: .venv/.dev  ## lint, types and the default test suite
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --dist worksteal --durations 25

test-slow: .venv/.dev  ## the long tests
	$(PY) -m pytest -m slow

newcomer: .venv/.dev  ## run the README's commands in an empty environment and check their output (about 7 minutes)
	$(PY) -m tests.newcomer

check: test  ## the same as test

docs: .venv/.dev  ## build the documentation into site/; links and formulas are checked
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

wheel: .venv/.demo  ## build the wheel into dist/, with CPU kernels compiled for this architecture
	$(PY) -m lipsformer.kernels.build lipsformer/kernels/prebuilt
	$(PY) -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -r lipsformer/kernels/prebuilt  # they would be taken before the sources, in the clone too

GRAPH_STUDY := table_missing_features_cora table_missing_features_citeseer ablation_lipschitznorm \
	ablation_cora ablation_citeseer depth_gat depth_gat_choices depth_transformer depth_residual \
	depth_residual_plateau table_residual_datasets search_gcn2 depth_gcn2 search_anchors \
	table_anchors table_trees learned_constant

graph-study: .venv/.dev  ## train what is missing of the graph tables, and continue what was stopped
	for name in $(GRAPH_STUDY); do $(PY) -m scripts.graph_sweep --config configs/graph/$$name.yaml || exit 1; done

clean:  ## remove the virtual environment and build leftovers
	rm -rf .venv build dist site lipsformer/kernels/prebuilt .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml
	test -e .venv/.dev || $(PY) -m pip install --quiet --disable-pip-version-check -e '.[train,demo]'
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@
