# `make demo` and `make test` do all their own set-up; everything they install lies in .venv and in the per-user data directory.
SHELL := /bin/sh
UV_VERSION := 0.13.9
PYTHON ?= $(shell for p in python3.12 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
UV := $(BIN)/uv --no-progress --system-certs
SYNC := $(UV) sync --frozen --compile-bytecode --inexact
# Byte code on disk saves every worker process several seconds of start-up.
unexport PYTHONDONTWRITEBYTECODE

# What of the fast tests runs; test-properties sets it to another marker.
FAST := not slow

.PHONY: help demo test test-fast test-fast-one test-fast-two test-properties test-slow soak lint typecheck install install-light install-dev clean

help:
	@echo "make demo       train the demo policy and watch the held-out solve rate rise"
	@echo "make test       the whole test suite (make test-fast | test-slow | test-trainer for a part)"
	@echo "make test-properties  the property tests with twenty times as many examples, new ones each time (about ten minutes, not part of make test)"
	@echo "make test-cluster  the Kubernetes environment on a real one-node cluster (root, Debian 12; builds it once, not part of make test)"
	@echo "make test-cgroup2  the sandboxes on a kernel with cgroup version 2 alone (root, Debian 12; a kernel in user mode; not part of make test)"
	@echo "make test-vllm  the trainer on real vLLM (its CPU build, in an environment that is made once; not part of make test)"
	@echo "make install    control plane, plugin, sandbox and trainer in .venv (install-light: control plane and plugin only)"
	@echo "make lint typecheck"

demo: install
	$(BIN)/rl demo $(DEMO_ARGS)

test: test-fast test-slow

# Two processes at once, about as long as each other: the suite is made of waiting as much as of work.
test-fast: install-dev
	@$(MAKE) --no-print-directory -j2 -Otarget test-fast-one test-fast-two

ONE := tests/trainer tests/plugin tests/test_light_install.py
test-fast-one: install-dev
	$(BIN)/python -m pytest -m "$(FAST)" $(PYTEST_ARGS) $(ONE)

test-fast-two: install-dev
	$(BIN)/python -m pytest -m "$(FAST)" -p no:cacheprovider $(PYTEST_ARGS) $(addprefix --ignore=,$(ONE))

# New examples each time, twenty times as many as in test-fast, so that a rare one turns up here rather than in a landing.
# Another hunt: PYTEST_ARGS="--hypothesis-seed=7 -k spelling".
test-properties: install-dev
	@$(MAKE) --no-print-directory test-fast FAST=hypothesis PYTEST_ARGS="--hypothesis-profile=thorough $(PYTEST_ARGS)"

test-slow: install-dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Real runs of verl on the CPU: synchronous with routing replay, asynchronous, dense. A part of test-slow.
test-trainer: install-dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS) tests/trainer/test_main_ppo.py tests/trainer/test_schedules.py

# Hours of a real run in minutes: 2,000 trials at 16 at once with real kills. Not part of the tests: SOAK_ARGS="--n 600 --seed 3".
soak: install-dev
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

# The sandboxes and the RayJob launcher on Kubernetes from Debian's source package: about nine CPU minutes the first time, then cached.
test-cluster: install-dev
	$(BIN)/python -m tests.cluster.up $(BIN)/python -m pytest -p no:cacheprovider -rs $(PYTEST_ARGS) -k cluster tests/cluster tests/sandbox/environments tests/sandbox/kubernetes tests/trainer/kuberay/test_cluster.py

# The namespace and Docker sandboxes under a kernel with version 2 of cgroups alone and project quotas: User-Mode Linux from Debian's packages.
test-cgroup2: install-dev
	$(BIN)/python -m tests.uml.up $(BIN)/python -m pytest -p no:cacheprovider -rs $(PYTEST_ARGS) -k "cgroup or version or rootful or uml" tests/uml tests/sandbox/environments/test_cgroup2.py tests/sandbox/environments/test_contract.py

# Real vLLM on the CPU in an environment of its own (6.5 GB in the user's cache directory), with a training run whose rollouts it generates.
test-vllm: install-dev
	$(BIN)/python -m tests.vllm.up -m pytest -p no:cacheprovider -m slow -rs -s $(PYTEST_ARGS) tests/trainer/engine tests/trainer/verl_plugin/test_rollout_vllm.py tests/trainer/test_vllm_run.py

lint: install-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: install-dev
	$(BIN)/mypy

install: .venv/.full
install-light: .venv/.light
install-dev: .venv/.dev

.venv/.uv:
	@test -n "$(PYTHON)" || { echo "lego-rl needs Python 3.12: install it (Debian: apt-get install python3.12 python3.12-venv) or say make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

.venv/.light: .venv/.uv pyproject.toml uv.lock
	$(SYNC)
	@touch $@

.venv/.full: .venv/.uv pyproject.toml uv.lock
	$(SYNC) --extra sandbox --extra trainer
	@touch $@

.venv/.dev: .venv/.full
	$(SYNC) --extra sandbox --extra trainer --extra telemetry --group dev
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis .artifacts
