# kvdir: every target sets up what it needs in .venv; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
# Without its dependencies, which are gigabytes of torch and CUDA that the nixl plane does not need.
NIXL := nixl-cu12==1.5.1
NATIVE_SOURCES := $(wildcard kvdir/index/csrc/*.[ch]pp kvdir/hashing/csrc/*.[ch]pp peer_agent/csrc/*.[ch]pp peer_agent/mover/csrc/*.[ch]pp third_party/xxhash/*.h)
NATIVE := kvdir/index/_native.abi3.so kvdir/hashing/_native.abi3.so peer_agent/_native.abi3.so peer_agent/mover/_ucx.abi3.so
PROTOS := $(sort $(wildcard proto/*/v1/*.proto))
ARGS ?=
DURATION_S ?= 60

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## This list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed $(NATIVE) ## Virtual environment with everything, native parts built

$(VENV)/.installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvdir needs Python 3.11 or newer; this is $$($(PYTHON) --version). Say make PYTHON=/path/to/python3.11"; exit 1; }
	@command -v c++ >/dev/null || { echo "kvdir needs a C++17 compiler: apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIXL)
	@touch $@ && touch -c $(NATIVE)

$(NATIVE) &: $(VENV)/.installed $(NATIVE_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $(NATIVE)

demo: setup ## Four agents and a coordinator move real bytes for a real trace (ARGS="--loss 0.2 --kill")
	$(BIN)/kvdir demo $(ARGS)

test: setup ## All tests (ARGS="-k name" for some)
	$(BIN)/python -m pytest -q $(ARGS)

test-redis: setup ## Tests with real Redis and Valkey servers, which it installs if it may (ARGS="-k name")
	@tests/redis/install.sh
	$(BIN)/python -m pytest -q -m redis tests/redis $(ARGS)

test-vllm: setup ## Tests with a real vLLM on CPU, in a virtual environment of its own that is kept (ARGS="-k name")
	@python=$$(tests/vllm/install.sh $(BIN)/python) && $$python -m pytest -q -m vllm --ignore tests/vllm/test_http.py tests/vllm $(ARGS)

test-vllm-http: setup ## Two vLLM servers, one after the other, with real agents between them
	@python=$$(tests/vllm/install.sh $(BIN)/python) && $$python -m pytest -q -m vllm tests/vllm/test_http.py $(ARGS)

test-sglang: setup ## The HiCache backend under SGLang's own classes, fetched once, in the environment of test-vllm
	@python=$$(tests/vllm/install.sh $(BIN)/python) && KVDIR_SGLANG_SITE=$$(tests/sglang/install.sh $$python) \
	  $$python -m pytest -q -m "sglang or not sglang" tests/sglang tests/contract/test_sglang.py $(ARGS)

test-ops: $(VENV)/.installed-ops $(NATIVE) ## Tests with a real Prometheus, Alertmanager and browser, which it installs if it may (ARGS="-k name")
	@tests/ops/install.sh
	$(BIN)/python -m pytest -q -m ops tests/ops $(ARGS)

# The extra's packages alone: installing kvdir itself once more would build the native parts once more.
$(VENV)/.installed-ops: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ops-tests"], sep="\n")' > $@.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $@.txt
	@touch $@

test-helm: setup ## Tests of the chart with Helm's own library, in a virtual environment of its own that is kept (ARGS="-k name")
	@python=$$(tests/helm/install.sh $(BIN)/python) && DAEMONS_PYTHON=$$PWD/$(BIN)/python UPDATE=$(UPDATE) $$python -m pytest -q -p no:cloudcoil -m helm tests/helm $(ARGS)

soak: setup ## Random histories of a simulated cluster (DURATION_S=120; ARGS="--seed 7")
	$(BIN)/python -m kvdir.testing.sim --duration-s $(DURATION_S) $(ARGS)

test-native: ## C++ cores alone, under AddressSanitizer and UBSan
	$(MAKE) -C tests/native test
	$(MAKE) -C tests/native/hashing test
	$(MAKE) -C tests/native/movers test
	$(MAKE) -C tests/native/ucx test

lint: setup ## ruff, mypy --strict, dependency rules, generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory verify-proto verify-docs

fmt: setup ## Format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## Regenerate the committed protobuf code
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

verify-proto: setup ## Fail if the committed protobuf code differs from proto/
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTOS) && \
	for file in $$(cd "$$out" && find . -type f); do \
	  cmp -s "$$out/$$file" "$$file" || { echo "$$file is not what proto/ gives: run make proto and commit"; exit 1; }; done

docs: setup ## Regenerate the documentation that comes from code
	$(BIN)/python -m kvdir.cli.options > docs/configuration.md
	$(BIN)/python -m kvdir.obs.reference > docs/metrics.md
	$(BIN)/python -m deploy.chart_reference

monitoring: setup ## Regenerate dashboards, recording rules and alerts
	$(BIN)/python -m deploy.monitoring

pictures: $(VENV)/.installed-ops $(NATIVE) ## Draw the dashboards and the page of the docs from a demo that runs some minutes (ARGS="--seconds 60")
	@tests/ops/install.sh
	$(BIN)/python -m deploy.monitoring.pictures $(ARGS)
	$(BIN)/python -m deploy.monitoring.page_picture $(ARGS)

verify-docs: setup ## Fail if generated documentation, dashboards or rules are out of date
	@$(BIN)/python -m deploy.monitoring --check
	@$(BIN)/python -m kvdir.cli.options | cmp -s - docs/configuration.md || { echo "docs/configuration.md is out of date: run make docs and commit"; exit 1; }
	@$(BIN)/python -m kvdir.obs.reference | cmp -s - docs/metrics.md || { echo "docs/metrics.md is out of date: run make docs and commit"; exit 1; }
	@$(BIN)/python -m deploy.chart_reference --check

check: lint test-native test ## What CI runs

bench: setup $(PEERS)/.installed ## All benchmarks, as tables
	$(BIN)/kvdir bench index
	$(BIN)/kvdir bench hash
	$(BIN)/kvdir bench ingest
	$(BIN)/kvdir bench lookup
	$(BIN)/kvdir bench score
	$(BIN)/kvdir bench replica
	$(BIN)/kvdir bench sketch
	$(BIN)/kvdir bench snapshot
	$(BIN)/kvdir bench faults
	tests/redis/install.sh && $(BIN)/kvdir bench redis
	$(BIN)/peer-agent bench read --peers-python $(PEERS)/bin/python --allow-emulated-rma
	$(BIN)/peer-agent bench load
	$(BIN)/peer-agent bench fairness
	$(BIN)/peer-agent bench idle

fleet: setup ## A thousand simulated nodes with churn and failures, plotted into docs/fleet.svg (ARGS="--nodes 100")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python bench/fleet.py --plot docs/fleet.svg $(ARGS)

bench-read: setup $(PEERS)/.installed ## Reads of all planes beside NIXL and Mooncake, against the bars (ARGS="--runs 1")
	$(BIN)/python bench/read.py --peers-python $(PEERS)/bin/python --allow-emulated-rma $(ARGS)

$(PEERS)/.installed: bench/install_peers.sh
	bench/install_peers.sh $(BIN)/python $(PEERS) $(NIXL)
	@touch $@

image-check: ## Build deploy/Containerfile without Docker and run what comes out (as root on Debian; minutes)
	deploy/check_image.sh

wheel: setup ## Build the abi3 wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove everything that was built
	rm -rf $(VENV) $(PEERS) build dist *.egg-info $(NATIVE) .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test test-redis test-vllm test-vllm-http test-sglang test-ops test-helm soak test-native lint fmt proto verify-proto docs monitoring pictures verify-docs check bench fleet bench-read image-check wheel clean
