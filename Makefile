# `make demo` and `make test` need only make and Python 3.11 or newer; each sets up .venv on its first use.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# One more than two cores: the tests of ranks often wait.
JOBS ?= 3
RANKS ?= 4

BIN := .venv/bin
READY := .venv/.ready
EXAMPLE := examples/ag_matmul.py
SMALL := --set M=64 --set K=32 --set N=32
TORCHRUN = $(BIN)/torchrun --standalone --nproc-per-node $(RANKS)

# Simulated ranks and torchrun's processes share the cores: more threads in each only get in each other's way.
export OMP_NUM_THREADS ?= 1

# The tests start a hundred processes: none of them is to compile again what another has.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test slow lint kernels setup clean
.DEFAULT_GOAL := demo

demo: $(READY)
	@echo "==> 1/5 the host program of a sharded all-gather matmul, lowered from examples/ag_matmul.py"
	@$(BIN)/hostir lower $(EXAMPLE)
	@echo "==> 2/5 it runs on 8 simulated ranks with ATen, compared with the unsharded result"
	@$(BIN)/hostir run $(EXAMPLE) --compare --kernels aten
	@echo "==> 3/5 the same with the Triton kernels, in Triton's interpreter and small"
	@TRITON_INTERPRET=1 $(BIN)/hostir run $(EXAMPLE) $(SMALL) --compare --kernels triton
	@echo "==> 4/5 under torchrun it runs on $(RANKS) processes with gloo and ATen"
	@$(TORCHRUN) -m hostir run $(EXAMPLE) --compare --device cpu --kernels aten
	@echo "==> 5/5 the same with the Triton kernels, in Triton's interpreter and small"
	@TRITON_INTERPRET=1 $(TORCHRUN) -m hostir run $(EXAMPLE) $(SMALL) --compare --device cpu --kernels triton

test: lint
	@echo "==> pytest: the tests, $(JOBS) at a time, without those that take more than a few seconds (make slow)"
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup -m "not slow and not alone"

slow: $(READY)
	@echo "==> pytest: the slow tests, $(JOBS) at a time"
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup -m "slow and not alone"
	@echo "==> pytest: the tests of ranks that die or stand still, one at a time: they have seconds to notice"
	@$(BIN)/python -m pytest -q -m alone tests/call/test_processes.py tests/call/test_torchrun.py

lint: $(READY)
	@echo "==> ruff: style and formatting"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "==> mypy: types"
	@$(BIN)/mypy
	@echo "==> import-linter: the layers of hostir"
	@$(BIN)/lint-imports --no-logo

kernels: $(READY)
	@echo "==> every kernel that plans load on a Hopper GPU, compiled without one ($(JOBS) processes, about ten minutes with two)"
	@$(BIN)/python -m tests.kernels.compile_every --jobs $(JOBS)

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "hostir needs Python 3.11 or newer: install it, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "==> making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "==> installing hostir and its development tools, versions from constraints.txt (minutes, the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	@echo "==> removing .venv and the caches of the tools"
	@rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
