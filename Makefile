# make demo       set up, train a small recommender by eager and by turbogr, write out/report/index.html
# make test       set up and run the tests (make test-all: the slow ones too)
# make fuzz       hostile generated programs against eager: N=1000 SEED=0 SECONDS=3600 (FUZZ=sweep: every construct)
# make fuzz-ops   calls of ops made from their contracts, under the sanitizers: N=200000 SEED=0 SECONDS=3600 (needs g++)
# make plant      faults planted in the row analysis, one at a time, and which guard notices each: SHARE=0.05 SECONDS=3600
# make sanitize   the kernels' tests under the address and undefined-behaviour sanitizers (needs g++)
# make lint       style, the import contract and types
# make count      how large each room is

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCHAIR := $(CURDIR)/$(VENV)/torchair
LOOPS := $(CURDIR)/$(VENV)/loops
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TURBOGR_TORCHAIR := $(TORCHAIR)
export TURBOGR_LOOPS := $(LOOPS)

.PHONY: demo test test-all fuzz fuzz-ops plant sanitize lint count setup clean

demo: setup
	$(BIN)/python examples/demo.py

# Two processes: most tests compile, in one thread. A file stays together, for the sake of what its tests share. In the
# order of folders: xdist's own puts files with few tests last, and those are the long ones, one of which ends alone.
test: setup $(TORCHAIR)/.ready $(LOOPS)/.ready
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: setup $(TORCHAIR)/.ready $(LOOPS)/.ready
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# A line of JSON per run is added to out/fuzz.jsonl, scripts of failures go to out/fuzz/.
N ?= 1000
SEED ?= 0
SECONDS ?= 86400
FUZZ ?= run
fuzz: setup
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ) $(if $(filter run,$(FUZZ)),--n $(N)) --seed $(SEED) \
	--seconds $(SECONDS) --json out/fuzz.jsonl --scripts out/fuzz

# Kernel against reference where the contract holds, the contract's error where it does not. SANITIZE=thread looks for
# races instead; an empty one calls the kernels as they are, which is faster.
SANITIZE ?= address,undefined
fuzz-ops: setup
	mkdir -p out
	CXX="$(CXX)" TURBOGR_KERNELS=required TURBOGR_SANITIZE=$(SANITIZE) OMP_NUM_THREADS=$(if $(findstring thread,$(SANITIZE)),4,1) \
	LD_PRELOAD="$(if $(SANITIZE),$$($(CXX) -print-file-name=lib$(if $(findstring thread,$(SANITIZE)),tsan,asan).so) $$($(CXX) -print-file-name=libstdc++.so))" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m tests.fuzz_ops --n $(N) --seed $(SEED) --seconds $(SECONDS) --json out/fuzz-ops.jsonl

# Resumed where it stopped: what is in out/plant.jsonl is not planted again. The database and the rule tests are asked
# about what no program noticed.
SHARE ?= 0.05
TESTS := tests/passes/rows tests/packing
plant: setup
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.plant --share $(SHARE) --total $(SECONDS) --kept out/plant.programs \
	--out out/plant.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.plant.ops out/plant.jsonl --total $(SECONDS) --out out/plant-ops.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.plant.suite out/plant.jsonl $(TESTS) --total $(SECONDS) \
	--kept out/plant.tests --out out/plant-suite.jsonl
	$(BIN)/python -m tests.plant.table out/plant.jsonl out/plant-ops.jsonl out/plant-suite.jsonl

# The sanitizer must be in the process before the kernels are, and libstdc++ with it, since Python does not bring one.
# What torch and Python leave behind at exit is not ours to report. Tests of the build compile for themselves, and those
# of AscendC's sources and their adapter run none of these kernels.
sanitize: setup
	CXX="$(CXX)" TURBOGR_KERNELS=required TURBOGR_SANITIZE=address,undefined OMP_NUM_THREADS=2 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" tests/kernels --ignore=tests/kernels/test_build.py \
	--ignore-glob="*/test_ascendc_*.py"

# mypy and import-linter read folders: a tree of links shows them the package as it installs.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/house && mkdir -p build/house/turbogr_compile
	ln -s $(CURDIR)/turbogr_compile/* build/house/turbogr_compile/
	ln -s $(addprefix $(CURDIR)/,passes lowering kernels training benchmarks examples) build/house/turbogr_compile/
	cd build/house && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml
	cd build/house && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p turbogr_compile

count: setup
	$(BIN)/python tests/house/count.py

setup: $(VENV)/.ready

# For target ascend-sim. Beside the packages, not among them: an installed torch_npu needs CANN to import torch.
$(TORCHAIR)/.ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(TORCHAIR) "torch_npu==2.13.0" && touch $@ \
	|| echo "torch_npu is not to be had: tests of ascend-sim are skipped"

# Training loops of others, for tests of deferral. Beside the packages and without what they need: that is another torch.
$(LOOPS)/.ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(LOOPS) transformers tokenizers safetensors huggingface_hub \
	accelerate lightning pytorch-lightning lightning-utilities torchmetrics psutil regex tqdm requests httpx httpcore \
	h11 anyio certifi idna sniffio httpx2 httpcore2 truststore charset-normalizer urllib3 hf-xet shellingham typer click && touch $@ \
	|| echo "training loops are not to be had: their tests are skipped"

# torch goes first and exactly: a range would pull a newer torch and its GPU libraries. LOCKED=1 takes the versions and
# hashes of requirements-dev.lock for all others, and nothing that has to be built (Python 3.11 and later).
LOCKED ?=
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(if $(LOCKED),$(BIN)/pip install --quiet --no-deps --require-hashes --only-binary=:all: -r requirements-dev.lock)
	$(BIN)/pip install --quiet $(if $(LOCKED),--no-deps --no-build-isolation) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
