# Everything a person does with this repository. `make demo` and `make test` need nothing but Linux and
# Python 3.11 or newer: they make .venv and install the pinned set into it, once.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTO_VENV := .venv-proto
PROTO_INSTALLED := $(PROTO_VENV)/.installed
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
GRPCIO_TOOLS := grpcio-tools==1.71.2
SOURCES := protos/diloco_protos common server worker simulator deploy tests tools benchmarks examples

# Overridable: make demo DEMO="--workers 4 --tokens 4_000_000"; make test TESTS="tests/unit -k round"
DEMO ?= --fresh --shards 2 --workers 3 --tokens 1_500_000 --seed 0 --report runs/demo/report.json --export runs/demo/model.safetensors
UP ?= --shards 2 --workers 3
CHAOS ?= --minutes 1 --every 5s --shards 2 --workers 8 --seed 1 --json runs/chaos/result.json --timeline runs/chaos/timeline.png
TESTS ?=
# How tests share the cores (tests/conftest.py has their order); one after the other: make test PARALLEL=
PARALLEL ?= -n logical --dist loadgroup --no-loadscope-reorder
# The interpreter that .venv is made with; without it, the first of these that is new enough.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)

# In CI, where nobody watches a progress bar, pip is quiet.
PIP := -m pip --disable-pip-version-check install $(if $(CI),--quiet)

.PHONY: help
help: ## Show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(INSTALLED) ## Make .venv and install the pinned set (the other targets do it by themselves)

# torch first and alone: pinned, it is taken from wherever pip is told to look (PIP_EXTRA_INDEX_URL for a CPU build),
# and nothing that is installed afterwards exchanges it.
$(INSTALLED): pyproject.toml constraints.txt
	@for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "make: no Python 3.11 or newer among: $(PYTHONS). Name one: make PYTHON=/path/to/python3" >&2; exit 2; fi; \
	echo "$$found -m venv $(VENV)"; \
	"$$found" -m venv $(VENV) || { echo "make: could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(BIN)/python $(PIP) -c constraints.txt $(TORCH)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: demo
demo: $(INSTALLED) ## Train a small GPT on 2 shards and 3 workers; ends by itself
	$(BIN)/diloco up $(DEMO)

.PHONY: test
test: $(INSTALLED) ## Run all tests; some of them: make test TESTS="tests/unit -k round"
	$(BIN)/python -m pytest $(PARALLEL) $(TESTS)

# -m wins over the one in pyproject.toml, which leaves these out of `make test`.
.PHONY: e2e-compose
e2e-compose: $(INSTALLED) ## Follow docs/deploy.md on real containers (needs a Docker engine, or root on Debian; minutes)
	@source tests/e2e/engine.sh; trap stop_engine EXIT; PYTHON=$(BIN)/python start_engine \
	  || { echo "make: NOT RUN: docs/deploy.md was not followed on real containers, see above" >&2; exit $(if $(CI),0,2); }; \
	$(BIN)/python -m pytest -m compose -s tests/e2e/test_compose.py && mkdir -p .cache && touch .cache/e2e-compose.ran

SIMULATE ?= --schedules 10000 --jobs 2

.PHONY: simulate mutants
simulate: $(INSTALLED) ## Run 10 000 random schedules of 3 shards and 5 learners in virtual time
	OMP_NUM_THREADS=1 $(BIN)/python -m diloco_simulator $(SIMULATE)

mutants: $(INSTALLED) ## Break one guard at a time: the simulation has to find each
	$(BIN)/python -m pytest -q tests/simulation/test_simulation_mutants.py

.PHONY: chaos
chaos: $(INSTALLED) ## Kill and freeze the processes of a cluster for a minute; nothing may be lost
	$(BIN)/diloco chaos $(CHAOS)

.PHONY: check
check: check-format check-types check-proto check-metrics check-layers check-wheel ## Check style, types, protocol, metrics, layers and wheel

.PHONY: check-format check-types check-proto check-metrics check-layers check-wheel
check-format: $(INSTALLED)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))

check-types: $(INSTALLED)
	$(BIN)/mypy --strict

check-proto: $(PROTO_INSTALLED)
	$(PROTO_VENV)/bin/python tools/protos.py --check

check-metrics: $(INSTALLED)
	@command -v promtool >/dev/null || printf '%s\n' '' \
	  '  NOT CHECKED: promtool is not on PATH, so nobody looks at metrics and alerts as Prometheus would.' \
	  '  It comes with Prometheus (Debian and Ubuntu: apt install prometheus).' '' >&2
	$(BIN)/python -m pytest -q tests/unit/test_metrics.py tests/artifacts/test_metrics_page.py tests/artifacts/test_alerts.py

check-layers: $(INSTALLED)
	$(BIN)/python -m pytest -q tests/unit/test_layering.py

check-wheel: $(INSTALLED)
	$(BIN)/python -m pytest -q tests/artifacts/test_packaging.py

# The oldest supported generator, on its own: generated code refuses runtimes older than its generator.
$(PROTO_INSTALLED): Makefile $(INSTALLED)
	$(BIN)/python -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python $(PIP) $(GRPCIO_TOOLS) setuptools
	@touch $@

.PHONY: proto
proto: $(PROTO_INSTALLED) ## Generate the protocol's code again
	$(PROTO_VENV)/bin/python tools/protos.py

# Minutes, not hours: the runs of docs/quality.md take an hour and are started by hand (benchmarks/quality.py).
BENCHMARKS := benchmarks/outer_round.py benchmarks/merge_kernel.py benchmarks/step_cost.py benchmarks/shard_memory.py \
              benchmarks/straggler.py benchmarks/recovery.py benchmarks/disk_rounds.py

.PHONY: bench
bench: $(INSTALLED) ## Run the benchmarks of a round, a merge, a step, a shard, a straggler, a disk (docs/performance.md)
	@missed=0; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || missed=1; done; exit $$missed

# With a compose file the cluster runs in containers, and `down` ends it; without one it runs in the foreground.
COMPOSE_FILE := $(firstword $(wildcard docker-compose.yml compose.yaml))
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) -f $(COMPOSE_FILE)

.PHONY: up down
up: $(if $(COMPOSE_FILE),,$(INSTALLED)) ## Bring a cluster up that trains without end: in containers, or here until Ctrl-C
	$(if $(COMPOSE_FILE),$(COMPOSE) up --build --detach,$(BIN)/diloco up $(UP))

down: ## End the containers of `make up`
	$(if $(COMPOSE_FILE),$(COMPOSE) down,@echo "make: there are no containers; end 'make up' with Ctrl-C where it runs")
