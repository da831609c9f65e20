# PY=... uses another Python environment with this project and its `dev` extra.
PYTHON ?= python3.12
PY ?= .venv/bin/python
WORKERS ?= auto
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile
# `make test-all` runs tests marked `long` once, with the default versions and instruction set.
QUICK := -m "not long"
LONG :=
# mypy rejects a folder without Python files.
TYPED := $(foreach folder,megatron megatron_fsdp_cuda_graphs tools examples tests benchmarks,$(if $(shell find $(folder) -name '*.py' 2>/dev/null),$(folder)))
CHECKED := $(TYPED) typings setup.py

# Otherwise each process compiles the project.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(PY),.venv/bin/python)
ENVIRONMENT := .venv/.installed
endif

# Other supported versions of megatron-core. 0.19.1 was yanked ("wrong version") and has the code of 0.19.0: one test
# suffices.
OTHER_CORES := 0.19.0 0.19.1
CORE_TESTS := $(addprefix tests/unit_tests/,package/test_overlay_extensions.py core training)

# Other versions of torch, tested on CPUs only.
OTHER_TORCHES := 2.12.1 2.13.0 2.14.1 2.15.0
TORCH_TRAININGS := $(addprefix tests/integration_tests/,benchmarks \
	$(addprefix test_,fsdp_graphs.py local_graphs.py checkpoints.py install.py))

.PHONY: help .venv demo rl-loop test test-all test-versions test-patch test-patch-quick $(OTHER_CORES:%=test-core-%) \
	test-processors test-avx2 test-sse4 test-threads test-torches test-installed \
	$(OTHER_TORCHES:%=test-torch-%) test-gpu test-functional bench measure docs lint format clean

help:
	@echo "make demo      train a small GPT under Megatron-FSDP, eager and graphed, and compare"
	@echo "make rl-loop   train a small GPT by reinforcement learning, with graphs that are released and restored"
	@echo "make test      unit and integration tests on the CPU backend"
	@echo "make test-all  all tests that need no GPU, including long ones: run before a release"
	@echo "make test-processors  make test with other instruction sets and numbers of threads"
	@echo "make test-versions  unit tests on other versions of megatron-core"
	@echo "make test-torches   unit tests, demo and some trainings on other versions of torch"
	@echo "make test-installed  unit tests of a copy installed by pip"
	@echo "make test-patch     apply the patch to a megatron-core checkout: import, train, test; test-patch-quick: few tests"
	@echo "make test-gpu  tests on the GPUs of this machine"
	@echo "make test-functional  train recipes and compare them with golden values"
	@echo "make bench     step times on the GPUs of this machine"
	@echo "make measure   measure the numbers in the documents on the GPUs of this machine"
	@echo "make docs      generate docs/compatibility.md and docs/results.md"
	@echo "make lint      ruff and mypy"
	@echo "make format    format with ruff"
	@echo "make .venv     create the environment of all targets"

.venv: $(ENVIRONMENT)

# The stamp is written last, so that an interrupted installation is repeated. pip itself would compile serially, and
# compile modules that nobody imports.
.venv/.installed: setup.py pyproject.toml constraints.txt
	@echo "Installing torch, megatron-core and the tools of this project into .venv"
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	.venv/bin/python -W ignore -m compileall -qq -j 0 -x '/(tests|testing|mypyc?|networkx|fontTools|pygments|virtualenv)/' .venv/lib
	touch $@

demo: $(ENVIRONMENT)
	$(PY) examples/demo.py

# RL has further options. Two ranks: on the CPU backend without GPUs.
rl-loop: $(ENVIRONMENT)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 \
		$(if $(shell command -v nvidia-smi),,-m megatron_fsdp_cuda_graphs.cpu_backend) examples/rl_loop.py $(RL)

# Files of integration tests take long: start them first. Tests in tests/gpu are imported and skipped.
test: $(ENVIRONMENT)
	CUDA_VISIBLE_DEVICES= $(PYTEST) --no-loadscope-reorder $(if $(LONG),,$(QUICK)) \
		$(wildcard tests/integration_tests tests/gpu tests/unit_tests)

test-all: LONG := yes
test-all: test test-processors test-versions test-torches test-installed test-patch demo

# The order of sums depends on the instruction set and the number of threads. MKL_CBWR works on all processors.
test-processors: test-avx2 test-sse4 test-threads

test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export MKL_CBWR := AVX2
test-avx2: export OMP_NUM_THREADS := 1

test-sse4: export ATEN_CPU_CAPABILITY := default
test-sse4: export ONEDNN_MAX_CPU_ISA := SSE41
test-sse4: export MKL_CBWR := COMPATIBLE
test-sse4: export OMP_NUM_THREADS := 2

test-threads: export OMP_NUM_THREADS := 4
# Ranks have more threads than there are cores: idle ones must not spin.
test-sse4 test-threads: export OMP_WAIT_POLICY := passive

test-avx2 test-sse4 test-threads:
	$(MAKE) test

test-versions: $(OTHER_CORES:%=test-core-%)

$(filter-out test-core-0.19.1,$(OTHER_CORES:%=test-core-%)): test-core-%: build/cores/%/megatron
	$(PY) -m tools.upstream_check build/cores/$*
	$(call with_core,$*) $(PYTEST) $(QUICK) $(CORE_TESTS)

test-core-0.19.1: test-core-%: build/cores/%/megatron | build/cores/0.19.0/megatron
	diff -r --exclude package_info.py --exclude __pycache__ build/cores/0.19.0/megatron $<
	$(call with_core,$*) $(PY) -m pytest tests/unit_tests/package/test_overlay_extensions.py

# Put that version ahead of the installed one.
with_core = CORE_VERSION=$(1) PYTHONPATH=$(CURDIR)/build/cores/$(1)$(addprefix :,$(PYTHONPATH))

$(OTHER_CORES:%=build/cores/%/megatron): build/cores/%/megatron: | $(ENVIRONMENT)
	$(PY) -m pip install --quiet --no-deps --target build/cores/$* megatron-core==$*

# Put a copy installed by pip ahead of this folder.
test-installed: COPY := PYTHONPATH=$(CURDIR)/build/installed$(addprefix :,$(PYTHONPATH))
test-installed: $(ENVIRONMENT)
	rm -rf build/installed
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --target build/installed .
	$(COPY) $(PYTEST) $(QUICK) tests/unit_tests

test-torches: $(OTHER_TORCHES:%=test-torch-%)

$(OTHER_TORCHES:%=test-torch-%): test-torch-%: build/torches/%/.installed
	$(call with_torch,$*) $(PY) examples/demo.py --device cpu --steps 8 --output build/torches/demo
	$(call with_torch,$*) $(PYTEST) $(QUICK) tests/unit_tests $(TORCH_TRAININGS)

# Like with_core. GPUs are hidden, because the CUDA packages match the torch of the environment.
with_torch = CUDA_VISIBLE_DEVICES= TORCH_VERSION=$(1) PYTHONPATH=$(CURDIR)/build/torches/$(1)$(addprefix :,$(PYTHONPATH))

# Install that torch and the packages that its import needs. Constraints of the machine may exclude new versions.
$(OTHER_TORCHES:%=build/torches/%/.installed): export PIP_CONSTRAINT := /dev/null
$(OTHER_TORCHES:%=build/torches/%/.installed): build/torches/%/.installed: | $(ENVIRONMENT)
	rm -rf build/torches/$*
	$(PY) -m pip install --quiet --no-compile --no-deps --target build/torches/$* torch==$*
	$(PY) -m pip install --quiet --no-compile --no-deps --target build/torches/$* \
		$$(sed -nE 's/^Requires-Dist: (nvidia-(nccl|nvshmem)-cu13==[0-9.]+).*/\1/p' build/torches/$*/torch-*.dist-info/METADATA)
	touch $@

# Apply the patch to a checkout, with the overlay off.
test-patch test-patch-quick: $(ENVIRONMENT)
	rm -rf build/checkout
	$(PY) -m tests.support.patched_checkout build/checkout $(if $(findstring quick,$@),--quick)

test-gpu: $(ENVIRONMENT)
	$(PY) -m pytest tests/gpu

# FUNCTIONAL selects recipes and options.
test-functional: $(ENVIRONMENT)
	$(PY) tests/functional_tests/run.py $(FUNCTIONAL)

# BENCH has further options. Times are meaningless without a GPU.
bench: $(ENVIRONMENT)
	$(PY) benchmarks/step_time.py --output build/bench/step_time.json --logs build/bench/logs $(BENCH)

measure: $(ENVIRONMENT)
	$(PY) benchmarks/measure.py $(MEASURE)

# Unit tests fail if these pages are out of date.
docs: $(ENVIRONMENT)
	$(PY) -m tests.support.compatibility > docs/compatibility.md
	$(PY) benchmarks/tables.py

lint: $(ENVIRONMENT)
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)
	$(PY) -m mypy $(TYPED)

format: $(ENVIRONMENT)
	$(PY) -m ruff check --fix $(CHECKED)
	$(PY) -m ruff format $(CHECKED)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
