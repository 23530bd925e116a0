# Every command a contributor or a newcomer needs. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
SERVE_ARGS ?=

# pip with what matters of its output: direct requirements, large downloads, warnings; all of it is in the log,
# whose end is shown when pip fails. $(1): what to install
define pip_install
	@rm -f $(VENV)/.failed; \
	{ PYTHONUNBUFFERED=1 $(PIP) install --progress-bar off -c constraints.txt $(1) 2>&1 || touch $(VENV)/.failed; } | \
	tee $(VENV)/pip.log | while IFS= read -r line; do case "$$line" in \
	  "Collecting "*"(from warmfront"*) line=$${line#Collecting }; echo "    resolving $${line%% *}" ;; \
	  *"Downloading "*.metadata*) ;; \
	  *"Downloading "*" MB)"*) echo "    downloading $${line#*Downloading }" ;; \
	  "Installing collected packages: "*) echo "    unpacking $$(echo "$$line" | tr ',' '\n' | wc -l | tr -d ' ') packages" ;; \
	  "WARNING: Location "*" is ignored: "*) ;; \
	  WARNING:*) echo "    $$line" ;; \
	esac; done; \
	test ! -e $(VENV)/.failed || { tail -n 30 $(VENV)/pip.log; echo "pip failed; all it said is in $(VENV)/pip.log"; exit 2; }
endef

.PHONY: help install serve test check lint types imports unit e2e coverage demo fmt clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Warmfront needs Python 3.11 or newer"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not create a virtual environment; on Debian: apt-get install python3-venv"; exit 2; }

$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> installing Warmfront and its dependencies (torch is the large one)"
	$(call pip_install,-e .)
	@touch $@

$(DEV): $(STAMP)
	@echo "==> installing test and lint tools"
	$(call pip_install,-e '.[dev]')
	@touch $@

install: $(STAMP) ## create .venv and install the runtime

serve: $(STAMP) ## fetch the default model, start two engine replicas and the gateway on 127.0.0.1:8080
	@$(VENV)/bin/warmfront serve $(SERVE_ARGS)

demo: $(STAMP) ## measure round robin, cost routing and the full pipeline side by side (under 4 minutes)
	@$(VENV)/bin/warmfront bench demo

check: lint types imports ## format, lint, types, import contracts

lint: $(DEV)
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check .

types: $(DEV)
	@$(VENV)/bin/mypy

imports: $(DEV)
	@$(VENV)/bin/lint-imports

fmt: $(DEV) ## format and fix what can be fixed
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

model: $(STAMP)
	@$(VENV)/bin/warmfront model pull smollm2-135m-instruct

test: check model ## everything CI runs
	@OMP_NUM_THREADS=1 $(VENV)/bin/coverage run -m pytest || { \
	  echo "==> the failed tests once more, alone: sockets, processes and a browser share two cores; who fails twice fails"; \
	  OMP_NUM_THREADS=1 $(VENV)/bin/coverage run -a -m pytest --last-failed --last-failed-no-failures none; }
	@$(VENV)/bin/coverage combine -q 2>/dev/null || true
	@sh tests/coverage_floor.sh $(VENV)/bin/coverage

clean: ## remove build products (not the model cache)
	rm -rf build dist *.egg-info .demo .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
