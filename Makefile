# PY=... runs the targets with another Python environment that has this project and its `dev` extra installed.
PYTHON ?= python3.12
PY ?= .venv/bin/python
WORKERS ?= auto
# Of tests whose ranks wait for each other: half as many again as there are processors.
RANK_WORKERS ?= $(if $(filter auto,$(WORKERS)),$(shell echo $$(( ($$(OMP_NUM_THREADS= nproc) * 3 + 1) / 2 ))),$(WORKERS))
# Tests marked `long`, such as pairs of flags, run in `make test-all` only, and there once: with the environment's own
# versions, on this processor as it is.
QUICK := -m "not long"
LONG :=
# mypy refuses a folder without Python files.
TYPED := $(foreach folder,megatron megatron_fsdp_cuda_graphs tools examples tests benchmarks,$(if $(shell find $(folder) -name '*.py' 2>/dev/null),$(folder)))
CHECKED := $(TYPED) typings setup.py

# Each of many processes would compile the project, and torch where it is not compiled ahead.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(PY),.venv/bin/python)
ENVIRONMENT := .venv/.installed
endif

# Versions of megatron-core that the patch admits besides that of constraints.txt. 0.19.1 was withdrawn from the registry
# ("wrong version") and can still be installed; its code is that of 0.19.0, so that no test of it need run twice.
OTHER_CORES := 0.19.0 0.19.1
CORE_TESTS := $(addprefix tests/unit_tests/,package/test_overlay_extensions.py core training)

# Each minor version of torch that is tested besides that of constraints.txt, on CPUs. pip brings none.
OTHER_TORCHES := 2.12.1 2.13.0 2.14.1 2.15.0
# One integration test of each kind, and the scripts.
TORCH_TRAININGS := $(addprefix tests/integration_tests/,benchmarks \
	$(addprefix test_,fsdp_graphs.py local_graphs.py checkpoints.py torch_fsdp.py install.py))

.PHONY: help .venv demo test test-all test-unit test-integration test-versions test-patch test-patch-quick $(OTHER_CORES:%=test-core-%) \
	test-processors test-avx2 test-sse4 test-threads test-torches test-installed \
	$(OTHER_TORCHES:%=test-torch-%) test-gpu test-functional bench measure docs lint format clean

help:
	@echo "make demo      train a small GPT under Megatron-FSDP, eager and graphed, and compare"
	@echo "make test      unit tests and integration tests on the CPU backend"
	@echo "make test-all  all tests that need no GPU, those that take long too: before a release"
	@echo "make test-processors  make test with other instruction sets and numbers of threads"
	@echo "make test-versions  unit tests on the other versions of megatron-core that the patch admits"
	@echo "make test-torches   unit tests, demo and some trainings on other versions of torch"
	@echo "make test-installed  unit tests of a copy that pip installed"
	@echo "make test-patch     apply the patch to a megatron-core checkout: import, train, test; test-patch-quick: few tests"
	@echo "make test-gpu  tests on the GPUs of this machine"
	@echo "make test-functional  recipes with golden values, those that this machine can run"
	@echo "make bench     time of a step of each kind, on the GPUs of this machine"
	@echo "make measure   what documents quote, on the GPUs of this machine, into benchmarks/results/release"
	@echo "make docs      docs/compatibility.md, from the table of flags"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff rewrite the files"
	@echo "make .venv     the environment that all of them use"

.venv: $(ENVIRONMENT)

# The stamp is written last: an installation that broke off is made again. pip would compile one module after another,
# and what no test imports.
.venv/.installed: setup.py pyproject.toml constraints.txt
	@echo "Installing torch, megatron-core and the tools of this project into .venv"
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	.venv/bin/python -W ignore -m compileall -qq -j 0 -x '/(tests|testing|mypyc?|networkx|fontTools|pygments|virtualenv)/' .venv/lib
	touch $@

demo: $(ENVIRONMENT)
	$(PY) examples/demo.py

test: test-unit test-integration

# Everything that needs no GPU, for which CI has no time.
test-all: LONG := yes
test-all: test test-processors test-versions test-torches test-installed test-patch demo

test-unit: $(ENVIRONMENT)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(if $(LONG),,$(QUICK)) tests/unit_tests

# These start processes of their own, one per rank. No GPU is shown, so the tests in tests/gpu say why they are skipped.
test-integration: $(ENVIRONMENT)
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -n $(RANK_WORKERS) --dist loadfile $(if $(LONG),,$(QUICK)) \
		$(wildcard tests/integration_tests tests/gpu)

# What processors differ in: with another instruction set or number of threads an operator adds in another order. `test`
# itself runs with all that this processor has, and one thread. MKL_CBWR is heeded on processors of any maker.
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
# Threads that wait for work must not keep others from it: ranks have more of them than there are cores.
test-sse4 test-threads: export OMP_WAIT_POLICY := passive

test-avx2 test-sse4 test-threads:
	$(MAKE) test

test-versions: $(OTHER_CORES:%=test-core-%)

$(filter-out test-core-0.19.1,$(OTHER_CORES:%=test-core-%)): test-core-%: build/cores/%/megatron
	$(PY) -m tools.upstream_check build/cores/$*
	$(call with_core,$*) $(PY) -m pytest -n $(WORKERS) --dist loadfile $(QUICK) $(CORE_TESTS)

test-core-0.19.1: test-core-%: build/cores/%/megatron | build/cores/0.19.0/megatron
	diff -r --exclude package_info.py --exclude __pycache__ build/cores/0.19.0/megatron $<
	$(call with_core,$*) $(PY) -m pytest tests/unit_tests/package/test_overlay_extensions.py

# That version lies ahead of the installed one on the path.
with_core = CORE_VERSION=$(1) PYTHONPATH=$(CURDIR)/build/cores/$(1)$(addprefix :,$(PYTHONPATH))

$(OTHER_CORES:%=build/cores/%/megatron): build/cores/%/megatron: | $(ENVIRONMENT)
	$(PY) -m pip install --quiet --no-deps --target build/cores/$* megatron-core==$*

# A copy that pip made, ahead of this folder on the path, as after `pip install .`.
test-installed: COPY := PYTHONPATH=$(CURDIR)/build/installed$(addprefix :,$(PYTHONPATH))
test-installed: $(ENVIRONMENT)
	rm -rf build/installed
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --target build/installed .
	$(COPY) $(PY) -m pytest -n $(WORKERS) --dist loadfile $(QUICK) tests/unit_tests

test-torches: $(OTHER_TORCHES:%=test-torch-%)

$(OTHER_TORCHES:%=test-torch-%): test-torch-%: build/torches/%/.installed
	$(call with_torch,$*) $(PY) examples/demo.py --device cpu --steps 8 --output build/torches/demo
	$(call with_torch,$*) $(PY) -m pytest -n $(WORKERS) --dist loadfile $(QUICK) tests/unit_tests
	$(call with_torch,$*) $(PY) -m pytest -n $(RANK_WORKERS) --dist loadfile $(QUICK) $(TORCH_TRAININGS)

# As with_core. No GPU is shown: what else CUDA needs is that of the environment, which fits its own torch.
with_torch = CUDA_VISIBLE_DEVICES= TORCH_VERSION=$(1) PYTHONPATH=$(CURDIR)/build/torches/$(1)$(addprefix :,$(PYTHONPATH))

# That torch, and of what it requires what it cannot be imported without in the environment's version. A machine's own
# constraints may know no torch that is so new.
$(OTHER_TORCHES:%=build/torches/%/.installed): export PIP_CONSTRAINT := /dev/null
$(OTHER_TORCHES:%=build/torches/%/.installed): build/torches/%/.installed: | $(ENVIRONMENT)
	rm -rf build/torches/$*
	$(PY) -m pip install --quiet --no-compile --no-deps --target build/torches/$* torch==$*
	$(PY) -m pip install --quiet --no-compile --no-deps --target build/torches/$* \
		$$(sed -nE 's/^Requires-Dist: (nvidia-(nccl|nvshmem)-cu13==[0-9.]+).*/\1/p' build/torches/$*/torch-*.dist-info/METADATA)
	touch $@

# The patch, applied to a checkout, without the start-up of this project.
test-patch test-patch-quick: $(ENVIRONMENT)
	rm -rf build/checkout
	$(PY) -m tests.support.patched_checkout build/checkout $(if $(findstring quick,$@),--quick)

# Each layout of ranks is started, with torchrun, in processes of its own.
test-gpu: $(ENVIRONMENT)
	$(PY) -m pytest tests/gpu

# Recipes with golden values: FUNCTIONAL names some of them and options.
test-functional: $(ENVIRONMENT)
	$(PY) tests/functional_tests/run.py $(FUNCTIONAL)

# Results, plot and profiles of each kind of step; BENCH has further options. Without a GPU the times mean nothing.
bench: $(ENVIRONMENT)
	$(PY) benchmarks/step_time.py --output build/bench/step_time.json --logs build/bench/logs $(BENCH)

measure: $(ENVIRONMENT)
	$(PY) benchmarks/measure.py $(MEASURE)

# The table of flags; a unit test says when it is out of date.
docs: $(ENVIRONMENT)
	$(PY) -m tests.support.compatibility > docs/compatibility.md

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
