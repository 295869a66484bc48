# SPDX-License-Identifier: Apache-2.0
# A thin front over CMake. `make` alone lists what there is.
BUILD ?= build
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
CMAKE_ARGS ?=
CTEST = ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS)
# With Ninja when it is there, unless the folder was configured otherwise.
GENERATOR = $(if $(wildcard $(BUILD)/CMakeCache.txt),,$(if $(shell command -v ninja),-G Ninja))

.PHONY: help setup build run test test-long test-gpu bench format lint install clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

setup: ## install what building and testing needs (apt-get, when root)
	@scripts/setup.sh

build: setup ## build library, tools and tests (Release) in build/
	@cmake -S . -B $(BUILD) $(GENERATOR) $(CMAKE_ARGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@rm -f $(BUILD).log
	@cmake --build $(BUILD) -j $(JOBS)

run: build ## four ranks exchange tokens of a skewed gate: on GPUs when there are any, else on CPUs
	$(BUILD)/bin/moe_perf -p 4 -b 1 -e 4096 -f 4 --hidden 1024 --routing zipf:0.8

test: build ## every test but the long ones
	$(CTEST) -LE '^long$$'

test-long: build ## the long ones
	$(CTEST) -L '^long$$'

test-gpu: ## the tests of the CUDA backend, built here or brought here in BUILD; needs a GPU
	@scripts/test_gpu.sh --build $(BUILD)

bench: build ## the layer shape of DeepSeek-V3 over four ranks; rows in build/bench.json
	$(BUILD)/bin/moe_perf -p 4 -b 1 -e 1024 -f 4 -n 50 --json $(BUILD)/bench.json

format: ## clang-format every source file in place
	@scripts/setup.sh --lint
	@scripts/lint.sh --format

lint: ## formatting, house style, clang-tidy
	@scripts/setup.sh --lint
	@scripts/lint.sh

install: build ## install under PREFIX (/usr/local); DESTDIR works
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean: ## remove every build folder
	@rm -rf build build-*
