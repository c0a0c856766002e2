# Every target sets up what it needs: `make test` works on a bare machine. PYTHON=... chooses the interpreter, V=1 shows all.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
SHELL := /bin/bash

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := 1
unexport PYTHONPATH PYTHONHOME

quiet := tools/quiet.sh
python := .venv/bin/python
source_dirs := transfer_engine tools native proxy efa cx7
sources := $(sort $(shell find $(source_dirs) -type f -not -path '*/__pycache__/*' 2>/dev/null))
cxx_files := $(shell find native proxy efa cx7 tools tests -name '*.cc' -o -name '*.h' 2>/dev/null)
# Tests keep to the loopback interface.
loopback_only := TE_NICS=lo
# A test that hangs is ended and named.
patience := timeout --signal=ABRT 1200
# libfabric is not instrumented: ThreadSanitizer cannot see its locks.
tsan_tests := -tce='*over tcp*,*over shm*' -sf='*pure_*,*sim_*,*engine_*,*gpu_*,*cx7_*,*verbs_*,*fabric_*'
# The sanitized builds make the extension, too. The first of them is also where lint looks for warnings.
asan_options := -DTE_SANITIZE=address -DTE_WERROR=ON -DTE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(python)
tsan_options := -DTE_SANITIZE=thread -DTE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(python)
# STRICT=1: a warning of the optimised build is an error, too. Not by default, since users build with compilers that we do not know.
STRICT ?=
wheel_options := $(if $(STRICT),-C cmake.define.TE_WERROR=ON)
native_tests := $(loopback_only) SHOW='test cases:.*skipped' $(quiet)

# Set-up is stale when .venv was moved or does not run any more, or when another interpreter is asked for.
ifneq ($(shell cat .venv/.home 2>/dev/null; $(python) -c 'print("runs")' 2>/dev/null),$(realpath .) runs)
stale := FORCE
else ifneq ($(PYTHON),)
ifneq ($(shell cat .venv/.python 2>/dev/null),$(PYTHON))
stale := FORCE
endif
endif

.PHONY: help setup build wheel loopback test compile-asan compile-tsan compile-standins test-native test-asan test-tsan test-arm test-fresh test-conformance-asan test-conformance-tsan test-python test-rdma test-rdma-wire test-gpu bench-gpu lint format bench soak clean distclean FORCE
help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1 - \2/p' Makefile | awk -F' - ' '{printf "make %-12s %s\n", $$1, $$2}'

# --- set-up and build ---------------------------------------------------------------------------------------------------
setup: .venv/.setup ## system packages (as root), .venv with build tools and linters
.venv/.setup: pyproject.toml tools/setup.sh $(stale)
	@tools/setup.sh venv

build: .venv/.wheel ## the wheel, built and installed in .venv
wheel: dist/.stamp ## the wheel, in dist/
	@ls dist/*.whl

build/sources.txt: FORCE
	@mkdir -p build; printf '%s\n' $(sources) | cmp -s - $@ || printf '%s\n' $(sources) >$@

# The build directory stays, so that only what changed is compiled again.
dist/.stamp: .venv/.setup build/sources.txt $(sources) CMakeLists.txt pyproject.toml LICENSE
	@rm -rf dist; mkdir -p dist
	@$(quiet) "build wheel" $(python) -m pip wheel --no-build-isolation --no-deps -w dist -C build-dir=build/wheel $(wheel_options) .
	@touch $@

# The first installation brings the dependencies, the second the files, even if the version is the same.
.venv/.wheel: dist/.stamp
	@$(quiet) "install dependencies" $(python) -m pip install "$$(echo $(CURDIR)/dist/*.whl)[test]"
	@$(quiet) "install wheel" $(python) -m pip install --force-reinstall --no-deps dist/*.whl
	@touch $@

# native(DIRECTORY, OPTIONS): configure and build te_tests in build/DIRECTORY.
define native
	@$(quiet) "configure $(1)" cmake -S . -B build/$(1) -G Ninja -DTE_TESTS=ON $(2)
	@$(quiet) "compile $(1)" cmake --build build/$(1)
endef

# --- tests --------------------------------------------------------------------------------------------------------------
loopback: .venv/.wheel ## prove that two processes of this machine can talk, over tcp and shm
	@for transport in tcp shm; do \
	  $(loopback_only) .venv/bin/transfer-engine loopback --transport $$transport || exit; \
	done

# The native tests run under the sanitizers, which is where they fail if they do. What compiles comes first, and takes all processors. After
# that the guests, which use little more than one, run beside what uses little more than one.
on_this_machine := test-asan test-tsan test-python test-conformance-asan test-conformance-tsan
test: .venv/.wheel compile-asan compile-tsan compile-standins ## all tests: native under the sanitizers, Python, RDMA
	@tools/setup.sh rdma
	@tools/beside.sh "$(MAKE) $(on_this_machine)" "$(MAKE) test-rdma test-rdma-wire"

compile-asan: .venv/.setup
	$(call native,asan,$(asan_options))
compile-tsan: .venv/.setup
	$(call native,tsan,$(tsan_options))

test-native: .venv/.setup ## native tests
	$(call native,native,-DTE_WERROR=ON)
	@$(native_tests) "test native" $(patience) build/native/te_tests

test-asan: compile-asan ## native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@LSAN_OPTIONS=suppressions=tests/native/lsan.supp UBSAN_OPTIONS=print_stacktrace=1 \
	  $(native_tests) "test asan" $(patience) build/asan/te_tests

# ThreadSanitizer cannot map its memory where addresses are randomised widely; setarch -R turns that off for the process.
test-tsan: compile-tsan ## native tests under ThreadSanitizer
	@TSAN_OPTIONS=suppressions=tests/native/tsan.supp:second_deadlock_stack=1 \
	  $(native_tests) "test tsan" $(patience) $$(setarch -R true 2>/dev/null && echo setarch -R) build/tsan/te_tests $(tsan_tests)

# The conformance suite on the fabrics of one process, with the package as it is installed but for its extension, which comes from the
# sanitized build. The sanitizer's library comes first in the process, since the interpreter is not built with it. pytest hides
# what tests print, so reports go to files.
# conformance(LABEL, LIBRARY, OPTIONS, PREFIX, SELECTION)
define conformance
	@rm -rf build/$(1)-site build/run/$(1)-report.*; mkdir -p build/$(1)-site/site-packages build/$(1)/standin build/run
	@cp -r "$$($(python) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"/transfer_engine build/$(1)-site/site-packages/
	@cp build/$(1)/_core.abi3.so build/$(1)-site/site-packages/transfer_engine/
	@$(loopback_only) $(call standins,$(1)) SHOW='[0-9]* passed.*' \
	  $(quiet) "test conformance under $(1)" $(patience) env -C build/run \
	  LD_PRELOAD="$$(g++ -print-file-name=$(2))" PYTHONPATH=$(CURDIR)/build/$(1)-site/site-packages \
	  $(3):log_path=$(CURDIR)/build/run/$(1)-report $(4) $(CURDIR)/$(python) -m pytest -c $(CURDIR)/pyproject.toml \
	  --rootdir $(CURDIR) -p no:cacheprovider -q $(CURDIR)/tests/conformance -k "(sim or standin) and not large $(5)"
	@! cat build/run/$(1)-report.* 2>/dev/null
endef

# AddressSanitizer keeps what the stand-in frees for a while, so memory grows with it.
test-conformance-asan: .venv/.wheel compile-asan ## the conformance suite in one process under AddressSanitizer
	$(call conformance,asan,libasan.so,ASAN_OPTIONS=detect_leaks=0,,and not (standin and grow_memory))

test-conformance-tsan: .venv/.wheel compile-tsan ## the part of it that is about threads and order under ThreadSanitizer
	$(call conformance,tsan,libtsan.so,TSAN_OPTIONS=suppressions=$(CURDIR)/tests/native/tsan.supp,$$(setarch -R true 2>/dev/null && echo setarch -R),and (concurrency or completion or counters or regions or deadlines or peers or messages or prepared or group_faults) and not fork)

# libfabric is not there for the other machine: only what runs on the simulated fabric.
cross := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DFABRIC_INCLUDE_DIR=$(CURDIR)/build/arm/include -DDOCTEST_INCLUDE_DIR=$(CURDIR)/build/arm/include
test-arm: .venv/.setup ## native tests for aarch64, cross-compiled, under qemu
	@tools/setup.sh arm
	@mkdir -p build/arm/include; ln -sfn /usr/include/rdma /usr/include/doctest build/arm/include
	$(call native,arm,-DTE_WERROR=ON $(cross))
	@$(native_tests) "test arm" $(patience) qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm/te_tests $(tsan_tests)

test-fresh: ## make loopback and quick tests on minimal Debian 12 and 13, as root and as a user; needs root
	@tools/setup.sh fresh
	@for suite in bookworm trixie; do tools/fresh.sh $$suite || exit; done

# pytest runs outside of the source tree, so that it can only import the installed wheel.
in_run := mkdir -p build/run && cd build/run &&
plain_pytest := ../../$(python) -m pytest -c ../../pyproject.toml --rootdir ../.. -p no:cacheprovider
pytest := $(in_run) $(loopback_only) $(plain_pytest)
ARGS ?=
# cx7 and efa run over stand-ins for their libraries. (A wheel without a transport is built where its headers are missing.)
# standins(DIRECTORY): where they are, for the tests.
standins = TE_TEST_STANDIN=$(CURDIR)/build/$(1)/libstandin_verbs.so TE_TEST_STANDIN_FABRIC=$(CURDIR)/build/$(1)/libstandin_fabric.so \
  TE_TEST_STANDIN_CUDA=$(CURDIR)/build/$(1)/libstandin_cuda.so TE_TEST_STANDIN_GDRAPI=$(CURDIR)/build/$(1)/libstandin_gdrapi.so
compile-standins: .venv/.setup
	@$(quiet) "configure native" cmake -S . -B build/native -G Ninja -DTE_TESTS=ON -DTE_WERROR=ON
	@$(quiet) "compile the stand-ins" cmake --build build/native --target standin_verbs standin_fabric standin_cuda standin_gdrapi
	@mkdir -p build/native/standin
test-python: .venv/.wheel compile-standins ## Python tests against the installed wheel; ARGS="-k name" for pytest
	@$(in_run) $(call standins,native) $(loopback_only) $(plain_pytest) -q $(ARGS) ../../tests

# An emulated processor is slow: tests have more time, and pytest does without hypothesis, which it would compile each time.
test-rdma: .venv/.wheel ## tests over Soft-RoCE devices, in an emulated guest; installs QEMU as root; ARGS as above
	@tools/setup.sh rdma
	@$(in_run) ../../$(python) ../../tests/rdma/guest --devices 4 --timeout 1800 -- \
	  $(plain_pytest) -p no:hypothesispytest -q --timeout 300 $(ARGS) ../../tests/rdma ../../tests/conformance

test-rdma-wire: .venv/.wheel ## tests between two such guests, joined by a wire
	@tools/setup.sh rdma
	@$(in_run) TE_RDMA_HOST=1 $(plain_pytest) -q --timeout 300 $(ARGS) ../../tests/rdma

# GPU_PYTHON is an interpreter of a machine where nothing is built: it takes the wheel in dist/ or what it has installed.
# TE_GPU_RESULTS=FOLDER has the records written elsewhere than in docs/results/; TE_COMMIT names the commit, for a copy without its history.
export GPU_PYTHON
.venv/.gpu: .venv/.wheel
	@$(quiet) "install CUDA's packages" $(python) -m pip install "$$(echo $(CURDIR)/dist/*.whl)[cuda,test]"
	@touch $@
test-gpu: $(if $(GPU_PYTHON),,.venv/.gpu) ## tests on a GPU; fails where there is none. Writes docs/results/gpu-tests.json
	@tools/gpu.sh test $(ARGS)

bench-gpu: $(if $(GPU_PYTHON),,.venv/.gpu) ## bandwidth and round trips on a GPU. Writes docs/results/gpu-bench.json
	@tools/gpu.sh bench $(ARGS)

soak: .venv/.wheel ## tests that run for minutes
	$(call native,native,-DTE_WERROR=ON)
	@$(native_tests) "soak native" env TE_TEST_SCALE=10 build/native/te_tests
	@$(pytest) -m soak --timeout 3600 $(ARGS) ../../tests

bench: .venv/.wheel ## host overhead, bandwidth, rate and latency on this machine
	@$(quiet) "configure bench" cmake -S . -B build/bench -G Ninja -DTE_BENCH=ON
	@$(quiet) "compile bench" cmake --build build/bench
	@for transport in tcp shm; do test ! -x build/bench/bench_fabric || $(loopback_only) build/bench/bench_fabric $$transport || exit; done
	@tools/bench/posting.sh build/bench
	@tools/bench/scatter.sh build/bench
	@build/bench/bench_watchers
	@$(loopback_only) .venv/bin/transfer-engine bench

# --- style --------------------------------------------------------------------------------------------------------------
# mypy sees the package as it is installed: tools/ as transfer_engine/tools.
lint: .venv/.wheel ## ruff, mypy, clang-format, compiler warnings
	@$(quiet) "ruff check" ruff check .
	@$(quiet) "ruff format" ruff format --check .
	@rm -rf build/typing; mkdir -p build/typing/transfer_engine
	@ln -s $(addprefix $(CURDIR)/,$(wildcard transfer_engine/*)) build/typing/transfer_engine
	@ln -s $(CURDIR)/tools build/typing/transfer_engine/tools
	@$(quiet) "mypy" env MYPYPATH=build/typing $(python) -m mypy --config-file pyproject.toml -p transfer_engine
	@$(quiet) "clang-format" bash -o pipefail -c \
	  'clang-format --dry-run -Werror "$$@" 2>&1 | sed -n "s/ code should be clang-formatted.*/ run make format/p"' - $(cxx_files)
	$(call native,asan,$(asan_options))

format: .venv/.setup ## rewrite the sources as lint wants them
	@ruff check --fix --exit-zero --quiet .
	@ruff format --quiet .
	@clang-format -i $(cxx_files)

# --- leftovers ------------------------------------------------------------------------------------------------------------
clean: ## what was built; .venv stays
	@rm -rf build dist
distclean: clean ## .venv too
	@rm -rf .venv
