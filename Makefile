# Two commands do everything on a fresh machine with Python >= 3.10: `make demo` and `make test`.
PYTHON ?= python3
# Extra arguments for pip, for example an index that holds CPU builds of torch.
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test slow lint clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 10) else "Python >= 3.10 is needed, this is " + v + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# The editable install is one stamp, the development tools another: the demo needs only the first.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.core
	$(BIN)/shortlist demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' --numprocesses 2 --dist loadfile

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
