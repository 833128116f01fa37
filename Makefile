# Two commands do everything on a fresh machine: `make run` and `make test`.
# Each creates .venv and installs into it first, once; the rest is `labkit …` (see `labkit --help`).

PYTHON ?= python3
PROFILE ?= auto
BIN := .venv/bin
READY := .venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test lab check gpu-test clean

run: $(READY)         ## execute all notebooks, and write results/index.html
	$(BIN)/labkit run --profile $(PROFILE)

# One thread a worker: two workers with two threads each would wait for each other at every step.
test: $(READY)        ## every test that this machine can run
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

gpu-test: $(READY)    ## the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m gpu

lab: $(READY)         ## JupyterLab, on this machine's loopback address only
	$(BIN)/jupyter lab --ip 127.0.0.1 --ServerApp.port_retries=0

check: $(READY)       ## is everything there?
	$(BIN)/labkit check

clean:                ## everything that can be made again; results stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "labkit needs Python 3.11 or later; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "this Python has no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
