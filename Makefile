# Every command makes what it needs: an environment in .venv, and in it the set of requirements it asks for.
# Needs Python >= 3.11 and make only. PYTHON=python3.12 picks the interpreter; ARGS="..." goes to the command.

VENV ?= .venv
PYTHON ?=
ARGS ?=
PIP_FLAGS ?= -qq --disable-pip-version-check --no-input
PYTEST_FLAGS ?= -n logical --maxprocesses 8 --dist worksteal

PY := $(VENV)/bin/python

# A set is ready when its stamp is there. The stamp's name holds a checksum of all that decides the set, and it is
# made last, so an interrupted or outdated installation has none. Without an interpreter no stamp counts.
KEY := $(shell { cat requirements.txt constraints.txt pyproject.toml; echo '$(PYTHON)'; } | cksum | tr ' ' '-')
ready = $(VENV)/.ready/$1-$(KEY)
SET_base = -r requirements.txt
SET_test = -e '.[test]'
SET_parity = -e '.[test,parity]'
$(shell test -x $(PY) || rm -rf $(VENV)/.ready)

.DEFAULT_GOAL := help
.PHONY: help demo test parity test-full test-latest suite-latest bench report report-full format clean distclean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(call ready,base) ## the main job: the same requests with reuse off, hash_only and validated; writes runs/demo
	$(PY) -m experiments.reuse --config=configs/reuse.py --config.workdir=runs/demo $(ARGS)

test: $(call ready,test) ## lint, format check and the tests (under 15 minutes on 2 cores)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest $(PYTEST_FLAGS) $(ARGS)

parity: $(call ready,parity) ## live comparison with transformers and torch on the CPU
	HETERO_KV_PARITY=1 $(PY) -m pytest $(PYTEST_FLAGS) -m "not full" tests/parity $(ARGS)

test-full: $(call ready,test) ## the full products, long random histories and kill loops too (under 90 minutes)
	$(PY) -m pytest $(PYTEST_FLAGS) -m "not parity" $(ARGS)

test-latest: ## model and kernel tests on the newest Python (3.12 to 3.14) and JAX found on the machine
	@python=$$(sh .ci/find_python.sh --newest) || { \
	  echo "test-latest: no Python from 3.12 to 3.14 on this machine; nothing was run"; exit 0; }; \
	$(MAKE) --no-print-directory VENV=.venv-latest PYTHON="$$python" suite-latest

suite-latest: $(call ready,test)
	@$(PY) -c 'import jax, platform; print("Python", platform.python_version(), "JAX", jax.__version__)'
	$(PY) -m pytest $(PYTEST_FLAGS) tests/hetero_kv tests/models $(ARGS)

bench: $(call ready,base) ## decode and prefill times, beside transformers where `make parity` has installed it
	$(PY) -m experiments.bench_model $(ARGS)

# A trace of Mooncake's format each; without one the replay generates its own.
TRACES ?= $(wildcard traces/*.jsonl)
REPLAYS := $(or $(basename $(notdir $(TRACES))),generated)

report: $(call ready,base) ## every ablation that needs no training, in minutes; TRACES="a.jsonl b.jsonl"; writes runs/report
	$(if $(TRACES),,@echo "no traces in TRACES: replays run on a generated one, and claims about published traces are left out")
	$(PY) -m experiments.tables --config.workdir=runs/report/tables
	$(if $(TRACES),$(foreach x,$(TRACES),$(PY) -m experiments.replay --config.trace=$x --config.workdir=runs/report/$(basename $(notdir $x)) &&) true,$(PY) -m experiments.replay --config.workdir=runs/report/generated)
	$(PY) -m experiments.admission --config.workdir=runs/report/admission
	$(PY) -m experiments.routing --config.workdir=runs/report/routing
	$(PY) -m experiments.advise --config.workdir=runs/report/advise
	$(PY) -m experiments.ttft --config=configs/ttft.py:quick --config.workdir=runs/report/ttft
	$(PY) -m experiments.levels --config=configs/levels.py:quick --config.workdir=runs/report/levels
	$(PY) -m experiments.report --out runs/report --title "Without training" \
	  $(addprefix runs/report/,tables $(REPLAYS) admission routing advise ttft levels) $(ARGS)

report-full: $(call ready,base) ## every ablation that is trained (under 2 hours on 2 cores; goes on where it was killed); writes runs/report-full
	$(PY) -m experiments.recall --config.jobs=2 --config.workdir=runs/report-full/recall
	$(PY) -m experiments.lm --config.jobs=2 --config.workdir=runs/report-full/lm
	$(PY) -m experiments.report --out runs/report-full --title "Trained" \
	  $(addprefix runs/report-full/,recall lm) $(ARGS)

format: $(call ready,test) ## format, fix what lint can fix, and rewrite BUILD from the imports
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(PY) -m tests.house.build_file --write

clean: ## remove caches
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find hetero_kv models experiments configs tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove caches and environments (runs/ stays)
	rm -rf .venv .venv-latest .venv*.lock

$(VENV)/.ready/%-$(KEY):
	@python=$$(sh .ci/find_python.sh $(PYTHON)) && \
	"$$python" .ci/environment.py $(if $(PYTHON),--same-version) $(VENV) $@ \
	  -- $(PIP_FLAGS) -c constraints.txt $(SET_$*)
