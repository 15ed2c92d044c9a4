# The chores of this repository, the same for people and CI. Everything runs in .venv, with the versions that
# constraints.txt pins. A Python other than the first suitable one: make test PYTHON=python3.12

VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it is first imported; to compile all of torch's at once takes half a minute.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt

IS_SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c '$(IS_SUITABLE)' 2>/dev/null && echo $$name && break; done)

# Without the plugins that packages bring which only some tests use: all of their hooks are asked of each test.
PYTEST := $(BIN)/python -m pytest -p no:anyio -p no:schemathesis

# Tests start hundreds of processes: each finds what others have compiled of Python, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test tests checks lint interpreted bounds core compiled slow mutants ray bench docs pictures gpu \
	gpu-first gpu-second gpu-third gpu-dry gpu-tune gpu-soak gpu-sanitize format clean

help:
	@echo "make demo    install what the demo needs into $(VENV) and run it"
	@echo "make serve   install what the server needs and serve the demo's model at http://127.0.0.1:8000"
	@echo "make test    linters, types, import rules, the documentation and the fast tests: what CI runs"
	@echo "make lint    linters, types and import rules alone"
	@echo "make interpreted  the core's tests alone, without compiling it"
	@echo "make bounds  the core's tests and some of the engine's, compiled with a test at each index of an array"
	@echo "make slow    the tests marked slow, and all properties with many more examples: an hour on two cores"
	@echo "make ray     install Ray Serve and test replicas on it"
	@echo "make mutants try one-line changes of the core against its tests: slow (MUTANTS=... how many)"
	@echo "make bench   the quick form of the benchmarks"
	@echo "make docs    build the documentation into site/"
	@echo "make pictures  draw what docs/images/ holds, the map of the rooms and the tables of BatchMaker's figures"
	@echo "make gpu     all tests and benchmarks that need a GPU, with the Python that is there (GPU_PYTHON=...)"
	@echo "make gpu-first, gpu-second, gpu-third  parts of it; the first takes at most 9 minutes (OUT=... results)"
	@echo "make gpu-dry the same code without a GPU"
	@echo "make gpu-tune     measure the kernels' tiles on this GPU and keep the choices (kernels/tuned/)"
	@echo "make gpu-soak     ten minutes of requests with random cancellations on a GPU (SOAK_S=... seconds)"
	@echo "make gpu-sanitize memcheck and racecheck over the kernels' tests"
	@echo "make format  format the code and apply the linter's safe fixes"
	@echo "make clean   remove $(VENV) and every cache"

demo: $(VENV)/.demo
	$(BIN)/cellrt demo

serve: $(VENV)/.serve
	$(BIN)/cellrt serve g2p

# For two cores. What the tests need is compiled first. Beside it, and then beside the tests, which run in two processes,
# the rest is checked in the time that they leave, and says what it found of each target at its end. Torch takes one
# thread in each of these, as threads that wait for each other by spinning cost several times as much once there are
# more than cores.
test:
	$(MAKE) --no-print-directory --jobs=2 tests checks

tests: compiled
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" --numprocesses 2 --dist loadfile

checks: $(VENV)/.dev
	nice -n 19 $(MAKE) --no-print-directory --output-sync=target lint docs interpreted

interpreted: $(VENV)/.dev
	NUMBA_DISABLE_JIT=1 $(PYTEST) -m "not slow and not hypothesis" tests/core
	NUMBA_DISABLE_JIT=1 $(PYTEST) tests/engine/test_turn_protocol.py

# Everything is compiled anew with a test at each index, into a folder of its own: some minutes.
BOUNDED := tests/core tests/engine/test_door.py tests/engine/test_fast_path.py tests/engine/test_bulk.py \
	tests/engine/test_sessions.py tests/engine/test_pages.py

bounds: $(VENV)/.dev
	mkdir -p build/bounds
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/build/bounds OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" --timeout 1200 $(BOUNDED)

# Where nothing is compiled yet, both processes of the tests would compile the same; Numba keeps it on disk.
core: $(VENV)/.demo
	$(BIN)/python -m cellrt.engine.compilation

# This imports all tests, and so makes their cells, whose kernels are compiled for it.
compiled: core $(VENV)/.dev
	$(PYTEST) --collect-only -qqq

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

slow: $(VENV)/.dev
	NUMBA_DISABLE_JIT=1 $(PYTEST) -m "not slow and hypothesis" tests/core tests/engine/test_turn_protocol.py
	OMP_NUM_THREADS=1 $(PYTEST) -m "slow or hypothesis" --hypothesis-profile thorough --timeout 600 \
		--numprocesses 2 --dist loadfile

ray: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[ray]'
	$(PYTEST) tests/ray

# How many are drawn, always the same ones for a number. They are tried in a copy, so that no mutant is left in this tree.
MUTANTS ?= 100

mutants: $(VENV)/.mutants
	rm -rf build/mutants && mkdir -p build/mutants
	cp -a cellrt cells kernels unfolders tests tools pyproject.toml build/mutants
	cd build/mutants && export PATH="$(CURDIR)/$(BIN):$$PATH" && \
		cosmic-ray init tools/mutants.toml session.sqlite && \
		cr-filter-operators session.sqlite tools/mutants.toml && \
		python -m tools.mutants session.sqlite $(MUTANTS) && \
		cosmic-ray exec tools/mutants.toml session.sqlite && \
		cr-report --surviving-only --show-diff session.sqlite && \
		cr-rate session.sqlite

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks overhead --quick
	$(BIN)/python -m benchmarks chain --quick
	$(BIN)/python -m benchmarks tree --quick
	$(BIN)/python -m benchmarks seq2seq --quick --only 2k

# Ten seconds. It fails at a link that leads nowhere, a page that nothing leads to, and what a page would fetch.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Each module writes its own picture and says at its top what it needs.
PICTURES := rooms states request_life batching cell_graphs latency policies busy_moment figures

pictures: $(VENV)/.demo
	@for name in $(PICTURES); do PYTHONPATH=. $(BIN)/python -m tools.$$name || exit 1; done

# On a bare machine with torch, Triton, Numba, pytest and hypothesis: no environment is made and nothing is fetched.
GPU_PYTHON ?= python3
GPU_TESTS := tests/gpu $(wildcard tests/engine/test_cuda_*.py) tests/engine/test_compiled_cells.py
GPU_PYTEST = PYTHONPATH=. $(GPU_PYTHON) -m pytest -c tests/gpu/bare.ini --rootdir . --confcutdir .

# A run goes on behind the parts that this commit has passed. Where there is no make: the command behind it.
GPU_RUN = PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu_run $(if $(OUT),--out $(OUT))

gpu:
	$(GPU_RUN) all

gpu-first:
	$(GPU_RUN) first

gpu-second:
	$(GPU_RUN) second

gpu-third:
	$(GPU_RUN) third

gpu-dry:
	@$(GPU_PYTHON) -c "import torch, triton, numba, pytest, hypothesis" || \
		{ echo "make .venv/.dev && make gpu-dry GPU_PYTHON=.venv/bin/python"; exit 1; }
	$(GPU_PYTEST) -m "not slow" $(GPU_TESTS) tests/engine/test_ring.py
	rm -rf build/gpu-dry
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu_run all --dry --out build/gpu-dry
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks device_host

gpu-tune:
	PYTHONPATH=. $(GPU_PYTHON) -m cellrt.kernels.tuning

# The soak of tests/gpu; `make gpu` runs 20 seconds of it.
SOAK_S ?= 600

gpu-soak:
	CELLRT_SOAK_S=$(SOAK_S) $(GPU_PYTEST) -m gpu --require-gpu -k soak tests/gpu

# memcheck and racecheck of the CUDA toolkit over the kernels' tests: slow.
gpu-sanitize:
	for tool in memcheck racecheck; do PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool \
		--error-exitcode 1 $(GPU_PYTHON) -m pytest -c tests/gpu/bare.ini --rootdir . --confcutdir . -m gpu tests/kernels \
		|| exit 1; done

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below are older than what they were made from exactly when an install is due.
IN_C := setup.py $(wildcard cellrt/native/*.c)

$(VENV)/.created:
	@test -n "$(PYTHON)" || { \
		echo "cellrt needs Python 3.11 or later; give its path: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c '$(IS_SUITABLE)' || { \
		echo "cellrt needs Python 3.11 or later, and $(PYTHON) is not (or does not start)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt $(IN_C)
	@echo "Installing the demo into $(VENV): PyTorch alone is hundreds of megabytes, unless pip has them."
	$(PIP_INSTALL) --editable '.[demo]'
	@# Only their weights are read: the packages they would import are not needed.
	$(PIP_INSTALL) --no-deps g2p-en silero-vad arabic-diacritizer
	@touch $@

# With gRPC and what `cellrt bench serve` needs, which the README shows next.
$(VENV)/.serve: $(VENV)/.created pyproject.toml constraints.txt $(IN_C)
	@echo "Installing the server into $(VENV): PyTorch alone is hundreds of megabytes, unless pip has them."
	$(PIP_INSTALL) --editable '.[bench,grpc]'
	@# Only its weights are read.
	$(PIP_INSTALL) --no-deps g2p-en
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.mutants: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[mutants]'
	@touch $@
