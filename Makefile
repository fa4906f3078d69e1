# `make demo` and `make test` need Python 3.11 or newer and the package index, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo examples test lint docs newest clean

# A language model in bf16 and in int8, then int4 weights of the latter; compared.
MIDTREAD := $(BIN)/midtread
demo: $(VENV)/demo.installed
	$(MIDTREAD) train demo run_name=bf16
	$(MIDTREAD) train demo run_name=int8 use_qwix_quantization=true quantization=int8
	$(MIDTREAD) quantize runs/demo/int8 quantization=int4w overwrite=true
	$(MIDTREAD) eval runs/demo/bf16 runs/demo/int8 runs/demo/int8-int4w
	$(MIDTREAD) generate runs/demo/int8-int4w quantize_kvcache=true
	$(MIDTREAD) report runs/demo/bf16 runs/demo/int8 runs/demo/int8-int4w

examples: $(VENV)/demo.installed
	@for example in examples/[0-9]*.py; do echo "== $$example"; $(BIN)/python $$example || exit 1; done

# Tests that round to fnuz formats or to floats of four bits need emitters of XLA's that compile
# slower; all others do without (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
ROUNDING := tests/numerics tests/laws/test_numerics.py tests/algorithms/test_solve.py \
	tests/interop/test_export.py tests/lm/test_codes.py \
	$(addprefix tests/peers/test_,lm.py ml_dtypes.py qwix.py)
test: lint docs
	$(PYTEST) --doctest-modules src $(ROUNDING)
	$(PYTEST) --old-emitters tests $(addprefix --ignore=,$(ROUNDING))
	$(MAKE) newest

lint: $(VENV)/dev.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site, into build/site; a broken link or a name without documentation is an error.
docs: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The core tests again on the newest JAX, where a Python that it supports can be found.
newest:
	PYTHON="$(PYTHON)" WORKERS=$(WORKERS) bash .ci/newest

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/dev.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/demo.installed

$(VENV)/docs.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-newest build
