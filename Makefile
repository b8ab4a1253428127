# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
F ?=
# More than a few only helps where there are as many cores: every worker may run servers of its own.
WORKERS ?= 2

.PHONY: demo test test-gpu check bench plan wheel clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## serve the embedded model, stream a short conversation, stop
	$(BIN)/python -m hybserve demo

test: $(VENV)/.installed  ## everything that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not multi_gpu and not full" tests

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m "gpu" tests

check: $(VENV)/.installed  ## format, lint, types, guards
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/guards

bench: $(VENV)/.installed  ## tests first, then the figures (B=engine|serve|vs_transformers|…)
	$(BIN)/python -m bench $(B)

plan: $(VENV)/.installed  ## make plan F=configs/x.yaml
	$(BIN)/hybserve plan $(F)

wheel: $(VENV)/.installed
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) dist build
