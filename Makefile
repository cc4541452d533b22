# Every target does the set-up it needs, in .venv; nothing has to be installed by hand but Python >= 3.11 and a C++
# compiler. `make help` lists the targets.
#
#   VENV=path       another environment than .venv
#   JOBS=n          how many test processes run at once; most of them wait for ranks
#   SECONDS=n       for how long `make fuzz` runs; RANKS=n: on how many; FUZZ="...": its further arguments
#   FLEX_MODEL_...  see setup.py and flex_model/_load.py

# Each uses the folder's build and environment; `make check` runs those at once that may be.
ifndef AT_ONCE
.NOTPARALLEL:
endif

PYTHON3 ?= python3
VENV ?= .venv
JOBS ?= 2
# Each file on one process, in the order of tests/conftest.py.
XDIST := -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTHON := $(abspath $(VENV))/bin/python
# New when the requirements or the Python are: then the environment is brought up to date.
NEEDS := $(filter-out requirements/docs.txt,$(wildcard requirements/*.txt))
stamp = flex_model-$(shell (cat $(1); $(PYTHON3) --version) | cksum | cut -d' ' -f1)
STAMP := $(VENV)/$(call stamp,$(NEEDS))
DOCS_STAMP := $(VENV)/docs/$(call stamp,requirements/docs.txt)

export PATH := $(abspath $(VENV))/bin:$(PATH)
export OMP_NUM_THREADS := 1
export JOBS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHON
# Else each of the hundreds of processes that tests start would compile what it imports once more.
unexport PYTHONDONTWRITEBYTECODE

CPP = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
NVCC := $(shell PATH="$${CUDA_HOME:-/usr/local/cuda}/bin:$$PATH" command -v nvcc)

.PHONY: help venv build demo test browser check bench docs lint clean quick grid parity sweep fuzz hosts cuda-emulated
.PHONY: check-build check-symbols check-sdist check-sanitizers check-slow check-versions check-installs wheel matrix

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

venv: $(STAMP)  ## .venv with everything that building, testing and linting take

$(STAMP):
	@.ci/make_venv "$(PYTHON3)" "$(VENV)" requirements/dev.txt
	@touch $@

$(DOCS_STAMP):
	@.ci/make_venv "$(PYTHON3)" "$(VENV)/docs" requirements/docs.txt
	@touch $@

build: venv  ## the compiled parts, in place; rebuilds what changed
	@.ci/quiet build $(PYTHON) setup.py build_ext --inplace

demo: build  ## two processes find the induction heads of a sharded model
	torchrun --standalone --nproc-per-node 2 examples/induction_heads.py

quick: build  ## the tests in one process of the packages that changed against the last commit
	$(PYTHON) .ci/quick_tests.py $(XDIST)

test: build browser  ## units in one process, and each behaviour on 2 ranks
	FLEX_MODEL_REQUIRE_BROWSER=1 pytest -q $(XDIST)

browser: venv  ## a headless browser for the tests of pages, in .venv, where none is installed
	@.ci/make_browser "$(VENV)/browser"

grid: build parity sweep  ## all combinations, by hand: parity, models of transformers, simulation, fuzz
	pytest -q -m grid --ignore tests/parity/test_frameworks.py $(XDIST)
	$(MAKE) --no-print-directory fuzz RANKS=1 SECONDS=300
	$(MAKE) --no-print-directory fuzz RANKS=2 SECONDS=600
	@echo "== grid: passed"

parity: build  ## the parity table: every framework, mesh and hook kind against the unsharded model
	PYTHONHASHSEED=0 $(PYTHON) tests/parity

sweep: build  ## a training step of every model of transformers that can be built tiny, under DDP and FSDP2
	PYTHONHASHSEED=0 pytest -q -rs -m sweep $(XDIST) tests/parity/test_sweep.py

fuzz: build  ## random programs on 2 ranks (RANKS=1|2|4) for SECONDS, against the unsharded model
	$(PYTHON) tests/fuzz --seconds $(or $(SECONDS),600) --ranks $(or $(RANKS),2) $(FUZZ)

cuda-emulated: build  ## the CUDA code on the CPU: the tests of a GPU, and the lines of csrc/cuda they ran
	find build/emulated -name '*.gcda' -delete 2>/dev/null || true
	pytest -q -m "" tests/test_cuda_emulated.py tests/test_cuda_emulated_processes.py
	PYTHONPATH=. $(PYTHON) -m tests.cuda.emulated.coverage

hosts: build  ## several hosts on this machine: network namespaces, as root
	pytest -q -rs -m hosts tests/hosts

.PHONY: sass gpu gpu-build gpu-test gpu-sanitize gpu-bench

gpu: venv  ## where there is a GPU: build, tests, compute-sanitizer, benchmarks (gpu-build, gpu-test, ...)
	$(PYTHON) .ci/gpu.py

gpu-build gpu-test gpu-sanitize gpu-bench: gpu-%: venv
	$(PYTHON) .ci/gpu.py $*

sass: venv  ## what nvcc makes of the kernels: registers, spills, accesses and instructions
	$(PYTHON) -m tests.cuda.sass

docs: $(DOCS_STAMP)  ## the documentation as a site in site/; links that lead nowhere fail
	@mkdir -p build  # without --quiet, which would not count warnings
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build >build/docs.log 2>&1 || { cat build/docs.log >&2; exit 1; }
	@echo "== docs: site/index.html"

bench: build  ## the benchmarks, each checked and timed against its baseline in one run
	@for file in benchmarks/bench_*.py; do echo "== $$file" && $(PYTHON) $$file || exit 1; done

lint: venv  ## format, lint and types
	ruff check --quiet .
	$(PYTHON) .ci/check_assignments.py
	ruff format --check --quiet .
	clang-format --dry-run -Werror $(CPP)
	mypy

check: build  ## all that CI runs before the tests
	@$(MAKE) --no-print-directory --output-sync=target -j2 AT_ONCE=1 check-at-once
	@$(MAKE) --no-print-directory check-sanitizers check-slow check-versions
	@echo "== check: passed"

.PHONY: check-at-once oldest-versions
check-at-once: oldest-versions check-sdist lint docs check-symbols

oldest-versions: venv
	$(PYTHON) .ci/versions.py make

check-build: build  ## the CUDA build, where nvcc is; check-sdist makes the one without
ifneq ($(NVCC),)
	@.ci/quiet build-cuda env FLEX_MODEL_CUDA=1 $(PYTHON) setup.py build_ext --inplace
	FLEX_MODEL_REQUIRE=cuda $(PYTHON) .ci/smoke.py $(CURDIR)
else
	@echo "no nvcc: the CUDA build is left out"
endif

check-symbols: check-build  ## the binaries depend on torch's stable C functions only
	$(PYTHON) .ci/check_symbols.py flex_model/*.so

check-sdist: venv  ## sdist -> install, without torch and without CUDA, in a fresh environment -> import from elsewhere
	@.ci/check_installs without_torch without_cuda

check-installs: venv  ## ways to install that take minutes each, and downloads; not in `make check`
	@.ci/check_installs

wheel: venv  ## a wheel in dist/ for PLATFORM=manylinux_2_28_...; refused if it needs newer symbols
	@.ci/make_wheel $(PLATFORM)

check-sanitizers: venv  ## engine and op tests under the address and undefined-behaviour sanitizers
	@.ci/check_sanitizers

check-slow: build  ## faults, installs, emulated GPUs, slow ranks, examples
	pytest -q -m "slow and not grid" $(XDIST)

check-versions: build  ## the oldest torch and transformers: a row of each framework, and fault tests
	$(PYTHON) .ci/versions.py check

matrix: build  ## a row of each framework on every torch that is supported; writes docs/versions.md
	$(PYTHON) .ci/versions.py matrix

clean:  ## remove what was built; .venv stays
	rm -rf build dist site *.egg-info flex_model/*.so flex_model/_build_config.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
