# Everything a person does with this repository. `make demo` and `make test` need nothing but Linux and
# Python 3.11 to 3.14: they make .venv and install the locked set into it, once.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTO_VENV := .venv-proto
PROTO_INSTALLED := $(PROTO_VENV)/.installed
TOOLS_VENV := .venv-tools
TOOLS_INSTALLED := $(TOOLS_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed
WHEELS_VENV := .venv-wheels
WHEELS_INSTALLED := $(WHEELS_VENV)/.installed
SOURCES := hatch_build.py protos/diloco_protos common server worker simulator deploy tests tools benchmarks examples

# Overridable: make demo DEMO="--workers 4 --tokens 4_000_000"; make test TESTS="tests/unit -k round"
DEMO ?= --fresh --shards 2 --workers 3 --tokens 1_500_000 --seed 0 --report runs/demo/report.json --export runs/demo/model.safetensors
UP ?= --shards 2 --workers 3
CHAOS ?= --minutes 1 --every 5s --shards 2 --workers 8 --seed 1 --json runs/chaos/result.json
TESTS ?=
GATE ?=
# How tests share the cores (tests/conftest.py has their order); one after the other: make test PARALLEL=
PARALLEL ?= -n logical --dist loadgroup --no-loadscope-reorder
# The interpreter that .venv is made with; without it, the first of these that is new enough.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
# Where builds of torch are looked for, and nothing else is: PyTorch's index of CPU builds, for example.
export TORCH_INDEX ?=

# Every wheel by its hash (requirements/). In CI, where nobody watches a progress bar, pip is quiet.
INSTALL := tools/install.py $(if $(CI),--quiet)
LOCKED := tools/install.py $(wildcard requirements/*.txt)

.PHONY: help
help: ## Show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(INSTALLED) ## Make .venv and install the locked set (the other targets do it by themselves)

# `pip check`: what is listed is complete, also for the build of torch that was found. Without a C compiler there are no
# kernels, and torch does their work.
$(INSTALLED): pyproject.toml deploy/pyproject.toml simulator/pyproject.toml hatch_build.py $(LOCKED) $(wildcard common/diloco_common/codec/kernels/*.[ch])
	@for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "make: no Python from 3.11 to 3.14 among: $(PYTHONS). Name one: make PYTHON=/path/to/python3" >&2; exit 2; fi; \
	echo "$$found -m venv $(VENV)"; \
	"$$found" -m venv $(VENV) || { echo "make: could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(BIN)/python $(INSTALL) torch run dev
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable . --editable deploy --editable simulator
	$(BIN)/python -m pip --disable-pip-version-check check >/dev/null
	@touch $@

.PHONY: demo
demo: $(INSTALLED) ## Train a small GPT on 2 shards and 3 workers; ends by itself
	$(BIN)/diloco up $(DEMO)

.PHONY: test
test: $(INSTALLED) ## Run the tests; some of them: make test TESTS="tests/unit -k round"
	$(BIN)/python -m pytest $(PARALLEL) $(TESTS)

# What takes long or depends on the pace of the machine: before a release, and before an issue is resolved.
.PHONY: gate gate-tests
gate: $(INSTALLED) ## Run all that takes too long for `make test`, and write docs/gate.md; some steps: make gate GATE="attack fuzz"
	$(BIN)/python tools/gate.py $(GATE)

# -m wins over the one in pyproject.toml, which leaves these out of `make test`. Mutants are a step of their own.
gate-tests: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m gate --ignore=tests/simulation/test_simulation_mutants.py $(TESTS)

.PHONY: e2e-compose
e2e-compose: $(INSTALLED) ## Follow docs/deploy.md on real containers (needs a Docker engine, or root on Debian; minutes)
	@source tests/e2e/engine.sh; trap stop_engine EXIT; PYTHON=$(BIN)/python start_engine \
	  || { echo "make: NOT RUN: docs/deploy.md was not followed on real containers, see above" >&2; exit 2; }; \
	$(BIN)/python -m pytest -m compose -s tests/e2e/test_compose.py

.PHONY: e2e-slurm e2e-ray
e2e-slurm: $(INSTALLED) ## Run our jobs on a real Slurm on four machines in namespaces (needs root, and Slurm or apt; two minutes)
	@source tests/launchers/get_slurm.sh; get_slurm \
	  || { echo "make: NOT RUN: deploy/slurm was not tried on a real Slurm, see above" >&2; exit 2; }; \
	$(BIN)/python -m pytest -m slurm tests/launchers/test_slurm.py

# Ray is not in the locked set: 240 MB.
e2e-ray: $(INSTALLED) ## Run `diloco up --on ray` on a real Ray cluster of four nodes (needs .venv/bin/pip install ray; minutes)
	@$(BIN)/python -c 'import ray' 2>/dev/null \
	  || { echo "make: NOT RUN: diloco up --on ray was not tried, as Ray is not installed in $(VENV)" >&2; exit 2; }; \
	$(BIN)/python -m pytest -m ray tests/launchers/test_ray.py

SIMULATE ?= --schedules 10000 --jobs 2

.PHONY: simulate mutants
simulate: $(INSTALLED) ## Run 10 000 random schedules of 3 shards and 5 learners in virtual time
	OMP_NUM_THREADS=1 $(BIN)/python -m diloco_simulator $(SIMULATE)

mutants: $(INSTALLED) ## Break one guard at a time: the simulation has to find each
	$(BIN)/python -m pytest $(PARALLEL) -m '' tests/simulation/test_simulation_mutants.py

ATTACK ?= --json runs/attack/result.json
FUZZ ?= --messages 100000 --seed 1

.PHONY: attack fuzz
attack: $(INSTALLED) ## Do the attacks to a real shard beside honest learners, and say what each costs (four minutes)
	@mkdir -p runs/attack
	OMP_NUM_THREADS=1 $(BIN)/python tests/attacks/measure.py $(ATTACK)

fuzz: $(INSTALLED) ## Offer 100,000 wrong messages, requests and files; each has to be refused by its code
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(FUZZ)

.PHONY: honest
honest: $(INSTALLED) ## Compare every merge of honest learners with the published formulas (minutes)
	$(BIN)/python benchmarks/honest.py

ZOO ?= --json runs/zoo/result.json

.PHONY: zoo
zoo: $(INSTALLED) ## Train ordinary programs as learners that die and come back, and alone (a quarter of an hour)
	$(BIN)/python tests/zoo/run.py $(ZOO)

ROUND_TRIPS ?= --draws 200 --seed 7

.PHONY: round-trips
round-trips: $(INSTALLED) ## Train, pull and load 200 models of transformers and PEFT, drawn at random (a quarter of an hour)
	$(BIN)/python tests/contract/round_trip.py $(ROUND_TRIPS)

.PHONY: chaos
chaos: $(INSTALLED) ## Kill and freeze the processes of a cluster for a minute; nothing may be lost
	$(BIN)/python -m diloco_chaos $(CHAOS)

.PHONY: check
check: check-format check-types check-proto check-images docs audit ## Check style, types, protocol, pages and packages

.PHONY: check-format check-types check-proto check-images audit
check-format: $(INSTALLED)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))

check-types: $(INSTALLED)
	$(BIN)/mypy --strict
	$(BIN)/mypy --strict benchmarks/*.py tools/*.py
	MYPYPATH=benchmarks/gpu:tests:tests/contract $(BIN)/mypy --strict --follow-imports=silent benchmarks/gpu

check-proto: $(PROTO_INSTALLED)
	$(PROTO_VENV)/bin/python tools/protos.py --check

check-images: $(INSTALLED)
	@$(BIN)/python tools/images.py >&2

audit: $(TOOLS_INSTALLED) ## Ask for known vulnerabilities of every package in requirements/
	$(BIN)/python tools/audit.py $(TOOLS_VENV)/bin/pip-audit

# The oldest supported generator, on its own: generated code refuses runtimes older than its generator.
$(PROTO_INSTALLED): requirements/proto.txt $(INSTALLED)
	$(BIN)/python -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python $(INSTALL) proto
	@touch $@

.PHONY: proto
proto: $(PROTO_INSTALLED) ## Generate the protocol's code again
	$(PROTO_VENV)/bin/python tools/protos.py

# Tools that look at this repository from outside, each pinned by hash like the rest.
$(TOOLS_INSTALLED): requirements/tools.txt $(INSTALLED)
	$(BIN)/python -m venv $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/python $(INSTALL) tools
	@touch $@

# The site of docs/. It reads our sources and imports none, so it needs no torch. A link that leads nowhere ends it; with
# --quiet it would not, since what is not said is not counted either.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs
$(DOCS_INSTALLED): requirements/docs.txt $(INSTALLED)
	$(BIN)/python -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) docs
	@touch $@

.PHONY: docs docs-serve
docs: $(DOCS_INSTALLED) ## Build the pages as a site that needs no network: build/site/index.html
	$(MKDOCS) build
docs-serve: $(DOCS_INSTALLED) ## Serve the pages on http://127.0.0.1:8000 while you write them
	$(MKDOCS) serve --dev-addr 127.0.0.1:8000

# A C compiler for other machines; 90 MB.
$(WHEELS_INSTALLED): requirements/wheels.txt $(INSTALLED)
	$(BIN)/python -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/python $(INSTALL) wheels
	@touch $@

.PHONY: wheels
wheels: $(WHEELS_INSTALLED) ## Build the sources and all wheels, with kernels for x86_64 and aarch64, into dist/, and try them
	$(BIN)/python tools/wheels.py --zig $(WHEELS_VENV)/bin/python
	$(BIN)/python -m pytest -q tests/artifacts/test_wheels.py

.PHONY: try-install
try-install: $(INSTALLED) ## Install wheel and sources into empty environments of each Python here, and train (minutes)
	$(BIN)/python tools/try_install.py

.PHONY: lock
lock: $(TOOLS_INSTALLED) ## Write requirements/ again; with newer versions: make lock LOCK=--upgrade
	$(BIN)/python tools/lock.py --uv $(TOOLS_VENV)/bin/uv $(LOCK)

.PHONY: pin-images
pin-images: $(INSTALLED) ## Name the images of others by the digest that they have today (needs a Docker engine and a registry)
	$(BIN)/python tools/images.py --pin

IMAGES ?= decoupled-diloco/server:dev decoupled-diloco/worker:dev

.PHONY: sbom
sbom: $(WHEELS_INSTALLED) ## Build the wheels; write what they and the images are made of (CycloneDX) into dist/
	rm -f dist/*.whl dist/*.cdx.json && $(BIN)/python tools/wheels.py --zig $(WHEELS_VENV)/bin/python >/dev/null
	for wheel in dist/*.whl; do $(BIN)/python tools/sbom.py wheel "$$wheel" >"$$wheel.cdx.json" || exit; done
	@for image in $(IMAGES); do \
	  if docker image inspect "$$image" >/dev/null 2>&1; then \
	    $(BIN)/python tools/sbom.py image "$$image" >"dist/$$(echo "$$image" | tr / - | tr : _).cdx.json" || exit; \
	  else echo "make: NOT WRITTEN: there is no image $$image here (docker-compose build)" >&2; fi; \
	done
	@ls dist

# Minutes, not hours. `make quality` takes hours.
BENCHMARKS := $(addprefix benchmarks/,outer_round.py step_cost.py shard_memory.py recovery.py)

.PHONY: bench
bench: $(INSTALLED) ## Run the benchmarks of a round, a step, a shard, a recovery (docs/performance.md)
	@missed=0; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || missed=1; done; exit $$missed

GPU ?=

.PHONY: gpu
gpu: $(INSTALLED) ## Prove and measure a learner on the card of this machine, in eight minutes (docs/gpu.md)
	$(BIN)/python benchmarks/gpu $(GPU)

.PHONY: quality
quality: $(INSTALLED) ## Run what is missing of docs/quality.md, and rebuild it: hours on two cores, may be stopped at any time
	$(BIN)/diloco lab protocol benchmarks/quality_protocol.toml --jobs 2 --out benchmarks/results/quality_protocol.jsonl
	$(BIN)/python benchmarks/quality.py

# With a compose file the cluster runs in containers, and `down` ends it; without one it runs in the foreground.
COMPOSE_FILE := $(firstword $(wildcard docker-compose.yml compose.yaml))
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) -f $(COMPOSE_FILE)

.PHONY: up down
up: $(if $(COMPOSE_FILE),,$(INSTALLED)) ## Bring a cluster up that trains without end: in containers, or here until Ctrl-C
	$(if $(COMPOSE_FILE),$(COMPOSE) up --build --detach,$(BIN)/diloco up $(UP))

down: ## End the containers of `make up`
	$(if $(COMPOSE_FILE),$(COMPOSE) down,@echo "make: there are no containers; end 'make up' with Ctrl-C where it runs")
