# make help lists the targets. Each target first runs the set-up that it needs, if that has not been done yet.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
# Macs need another release of torch than Linux. build_support/backend.py explains why.
REQUIRED_TORCH := torch==$(if $(filter Darwin,$(shell uname -s)),2.14.1,2.13.0)
# On Linux pip's default build of PyTorch includes gigabytes of CUDA, so the CPU build from PyTorch's index is preferred.
# If TORCH_INDEX is empty, pip installs the default build.
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname -s)),https://download.pytorch.org/whl/cpu)
TESTS ?= tests softmetal/tests
# Several workers share the cores, so OpenMP threads that spin while they wait make the tests many times slower.
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(shell nproc 2>/dev/null || sysctl -n hw.ncpu) --dist worksteal --durations=40 --durations-min=4
SOURCES := setup.py $(shell find csrc kernels -type f) $(wildcard build_support/*.py)
DEVICE_SOURCES := $(shell find softmetal/src -name '*.mm' -o -name '*.cpp' -o -name '*.h' 2>/dev/null)
# The files that clang-format checks. The headers below softmetal's msl/ are excluded, because many are tables of macros.
CXX_FILES := $(shell find csrc kernels -type f) $(wildcard lab/*/*.cpp \
	$(foreach folder,tests/cpu tests/planner tests/support tests/support/kernels $(addprefix softmetal/src/softmetal/,runtime runtime/pytorch runtime/include/* executor executor/* msl) \
	softmetal/examples/* softmetal/tests/host, \
	$(addprefix $(folder)/*,.h .cpp .mm)))
# The tests' build adds the MPS backend on the software Metal device if its packages are present.
BUILT := $(VENV)/.built-$(shell sh scripts/system_packages.sh has-softmetal && echo mps || echo cpu)

.PHONY: help build compiled test test-all lint format docs demo demo-mps demo-xlstm demo-qlora demo-mixture bench bench-mlstm macos macos-mistakes campaign races counts mutate clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / {printf "%-15s%s\n", $$1, $$2}' Makefile

$(VENV)/.installed: pyproject.toml softmetal/pyproject.toml scripts/system_packages.sh
	@echo "== setting up $(VENV): $(REQUIRED_TORCH) first, then the development packages"
	@sh scripts/announce_setup.sh $(PY) "$(TORCH_INDEX)"
	@sh scripts/system_packages.sh install
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(REQUIRED_TORCH)
	@$(PIP_INSTALL) "setuptools>=77" wheel ninja numpy
	@WITHOUT_EXTENSION=1 $(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable softmetal
	@touch $@

$(BUILT): $(VENV)/.installed $(SOURCES) $(DEVICE_SOURCES)
	@echo "== building the extension in place"
	@SOFTMETAL=$$(sh scripts/system_packages.sh has-softmetal && echo 1) $(PY) setup.py --quiet build_ext --inplace
	@if sh scripts/system_packages.sh has-softmetal; then $(PY) -c 'import softmetal; softmetal.install()'; fi
	@touch $@

# A second make evaluates BUILT again, after the set-up has installed the packages on which BUILT depends.
build: $(VENV)/.installed ## set up .venv and build the extension in place
	@$(MAKE) --no-print-directory compiled

compiled: $(BUILT)

test: build ## the tests, with a sample of the cases on the software Metal device
	$(PYTEST) $(TESTS)

test-all: build ## the tests with all cases (long)
	$(PYTEST) $(TESTS) --everything

lint: $(VENV)/.installed ## ruff, mypy, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.installed ## rewrite the sources as lint wants them
	$(VENV)/bin/ruff check --fix --quiet . || true
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

docs: $(VENV)/.installed ## the documentation's site, in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

demo: build ## run a sentence-embedding model in 4 bit, and train a small Llama that writes
	$(PY) examples/demo.py
	$(PY) examples/writer.py

# On Linux the demo runs on the software Metal device, which takes minutes.
demo-mps: build ## the demo on mps
	$(PY) $$(sh scripts/system_packages.sh has-softmetal && echo -m softmetal) \
		examples/demo.py --device mps

demo-xlstm: build ## train a small xLSTM for a minute and let it write, in fp32 and in 4 bit
	$(PY) examples/xlstm.py

demo-qlora: build ## train adapters on 4-bit and on fp32 weights of a sentence model (a table, a picture)
	$(PY) examples/qlora.py

demo-mixture: build ## train a small Mixtral for a minute and pack its experts
	$(PY) examples/mixture.py

bench: build ## CPU benchmark against PyTorch's own kernels
	$(PY) -m lab.cpu.cpu_gemm

bench-mlstm: build ## compare the time of one mLSTM call with one call per token
	$(PY) -m lab.mac.mlstm_times

macos: $(VENV)/.installed ## cross-build the macOS wheel and check its symbols and contents (TORCH=2.15.0, or all)
	$(PY) -m build_support.macos $(if $(TORCH),--torch $(TORCH))

macos-mistakes: macos ## break the Mac build in five ways; the build must report each mistake
	$(PY) -m build_support.macos_mistakes

campaign: build ## look for crashes, hangs and wrong results (MINUTES, SEED): docs/use/reliability.md
	nice -n 15 $(PY) -m tests.campaign --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

races: build ## test the CPU kernels for data races, with ThreadSanitizer
	$(PY) -m pytest -q tests/cpu/test_cpu_kernels.py -k threads_do_not_race --everything

counts: build ## count the kernels' M1 instructions with Mesa's compiler and check the limits (root, minutes)
	sh lab/agx/setup.sh
	$(PY) -m lab.counting.kernel_counts --check
	$(PY) -m lab.counting.instructions
	$(PY) -m lab.counting.tensor_instructions --check

mutate: $(VENV)/.installed ## break kernels/ in one place at a time; a test must fail for each (JOBS at once)
	$(PY) tests/kernels/mutate.py --jobs $(or $(JOBS),2)

clean: ## remove what was built (not .venv)
	rm -rf build softmetal/build dist demo-output torch_marlin_metal/*.so $(VENV)/.built-*
