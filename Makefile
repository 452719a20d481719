# Two commands do everything in a clean clone, set-up included: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.attn_pass_ready
NPU := .venv-npu
SITE := .venv-docs
# Where a collection of cases from the field lies, if there is one.
CASES ?= cases/run.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-browser test-explorer test-runtimes test-npu test-tpu-aot test-xla test-version fuzz sanitize lint types docs site wheel cases bench-s4 bench-peers

help:
	@echo "make demo      explain, rewrite and check real models, then measure field report S4"
	@echo "make test      run the tests"
	@echo "make test-browser  open the HTML report in a headless Chromium, where there is one"
	@echo "make test-explorer  run the adapter in Model Explorer, in .venv-explorer"
	@echo "make test-runtimes  export to ONNX Runtime and OpenVINO and run the results, in .venv-runtimes"
	@echo "make test-npu  run the tests against the real torch_npu, without a device, in $(NPU)"
	@echo "make test-tpu-aot  compile every kernel for TPUs with their own compiler, in .venv-tpu; no TPU needed"
	@echo "make test-xla  run the tests of torch_xla on its CPU device, in .venv-xla (torch 2.9, several GB)"
	@echo "make test-version TORCH=2.11.0  run the core tests with another torch, in .venv-torch-2.11.0"
	@echo "make fuzz      N=2000 generated programs, rewritten and compared with eager; SEED=... draws the same again; ARGS='--target cpu_kernel'"
	@echo "make sanitize  the CPU kernel's drawn calls under the address, undefined-behaviour and thread sanitizers of GCC"
	@echo "make wheel     build the wheel, install it in a fresh environment, and use it there"
	@echo "make lint      ruff and the import contracts"
	@echo "make types     mypy --strict on the package"
	@echo "make docs      write the parts of docs/ that come from the code, and the page and pictures of the results"
	@echo "make site      build the documentation as a site in build/site, with mkdocs in $(SITE)"
	@echo "make cases     run the collected cases from the field, if they are at CASES=$(CASES)"
	@echo "make bench-s4  measure field report S4 in full (ARGS='--json FILE')"
	@echo "make bench-peers  install ONNX Runtime, OpenVINO and zentorch, and measure them beside the pass"
	@echo "make setup     create $(VENV) once; every other command does it when needed"

setup: $(STAMP)

# torch first and alone: everything after it then resolves against the pinned build instead of bringing one of its own.
# timm without what it asks for: torchvision, which the models of the benches do not use, would bring another torch.
# flash-attn is its Python alone, for the tests, which stand in for its kernels (tests/support/flash_attn_stand_in.py): a build of
# seconds that needs no CUDA compiler and asks GitHub for nothing. In a folder of its own, so that no other package of the
# environment takes it for the whole.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps timm
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE $(BIN)/python -m pip install -c constraints.txt \
	    --no-deps --no-build-isolation --use-pep517 --upgrade --target $(VENV)/flash_attn_python flash-attn
	touch $@

demo: $(STAMP)
	$(BIN)/python -m bench demo $(ARGS)

# Two workers of a thread each: a compile is a compiler process of its own, and OpenMP's threads wait by working, so that
# more of them than cores take a third of the time for nothing.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

# Skips without a Chromium (Debian: apt-get install chromium; or CHROMIUM=path).
test-browser: $(STAMP)
	$(BIN)/python -m pytest tests_on/browser $(ARGS)

# An environment of its own: Model Explorer brings a web server.
.venv-explorer/.attn_pass_ready: constraints.txt
	test -x .venv-explorer/bin/python || $(PYTHON) -m venv .venv-explorer
	.venv-explorer/bin/python -m pip install -c constraints.txt torch
	.venv-explorer/bin/python -m pip install -c constraints.txt ai-edge-model-explorer pytest rich typer jinja2 platformdirs
	touch $@

test-explorer: .venv-explorer/.attn_pass_ready
	OMP_NUM_THREADS=1 .venv-explorer/bin/python -m pytest tests_on/explorer $(ARGS)

# An environment of its own: the runtimes bring backends of torch.compile and libraries of OpenMP.
.venv-runtimes/.attn_pass_ready: constraints.txt constraints-runtimes.txt
	test -x .venv-runtimes/bin/python || $(PYTHON) -m venv .venv-runtimes
	.venv-runtimes/bin/python -m pip install -c constraints.txt torch
	.venv-runtimes/bin/python -m pip install -c constraints.txt -c constraints-runtimes.txt \
	    onnx onnxscript onnxruntime openvino executorch transformers pytest rich typer jinja2 platformdirs
	.venv-runtimes/bin/python -m pip install -c constraints-runtimes.txt --no-deps torch-tensorrt  # for its checks alone
	touch $@

test-runtimes: .venv-runtimes/.attn_pass_ready
	OMP_NUM_THREADS=1 .venv-runtimes/bin/python -m pytest tests_on/runtimes $(ARGS)

# An environment of its own: torch_npu asks for one version of torch, and makes plain `import torch` load it. Without
# what it depends on; gcc and nm are needed for the libraries that stand in for CANN's (tests_on/npu/stub_libraries.py).
$(NPU)/.ready: constraints-npu.txt
	test -x $(NPU)/bin/python || $(PYTHON) -m venv $(NPU)
	$(NPU)/bin/python -m pip install -c constraints-npu.txt torch
	$(NPU)/bin/python -m pip install -c constraints-npu.txt numpy pyyaml pytest rich typer jinja2 platformdirs
	$(NPU)/bin/python -m pip install -c constraints-npu.txt --no-deps torch-npu
	touch $@

test-npu: $(NPU)/.ready
	$(NPU)/bin/python -m pytest tests_on/npu $(ARGS)
# Environments of their own: libtpu is large, and torch_xla needs the torch of its release.
.venv-tpu/.attn_pass_ready: constraints.txt constraints-tpu.txt
	test -x .venv-tpu/bin/python || $(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install -c constraints.txt torch
	.venv-tpu/bin/python -m pip install -c constraints.txt -c constraints-tpu.txt jax libtpu pytest rich typer jinja2 platformdirs
	touch $@

test-tpu-aot: .venv-tpu/.attn_pass_ready
	.venv-tpu/bin/python -m pytest tests_on/tpu_aot $(ARGS)

.venv-xla/.attn_pass_ready: constraints-xla.txt
	test -x .venv-xla/bin/python || $(PYTHON) -m venv .venv-xla
	.venv-xla/bin/python -m pip install -c constraints-xla.txt torch 'torch_xla[pallas]' flax pytest rich typer jinja2 platformdirs numpy
	touch $@

test-xla: .venv-xla/.attn_pass_ready
	.venv-xla/bin/python -m pytest tests_on/xla $(ARGS)

# An environment a version, with whatever build of torch the registry has for it (gigabytes, mostly). Not in CI; the
# recorded runs are in docs/results/versions.md.
TORCH ?= 2.11.0
CORE := tests/model tests/graph tests/reading tests/patterns tests/poor_cases tests/planner tests/tuning tests/verify \
    tests/entries tests/report/test_report.py tests/test_engine.py tests/test_options.py \
    $(addprefix tests/integration/test_,faults.py threads.py composes.py traps.py training.py) \
    $(addprefix tests/targets/test_,sdpa_rules.py local.py recompute.py kernel_rules.py kernels.py added_masks.py flex_cuda.py) \
    tests/devices tests/bench/test_bench_gpu.py

test-version:
	test -x .venv-torch-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install torch==$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install numpy rich typer jinja2 platformdirs pytest pytest-xdist hypothesis ziglang
	PYTHONPATH=. .venv-torch-$(TORCH)/bin/python -m pytest -m "not slow" -n 2 $(CORE) $(ARGS)

# The wheel in an environment of its own, with the libraries of this one: what is missing in it shows there.
wheel: $(STAMP)
	.ci/wheel

fuzz: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_run.py $(or $(N),2000) $(SEED) $(ARGS)

# ARGS='thread avx2' is one of them alone.
sanitize: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/devices/cpu/sanitize.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python docs/build.py
	$(BIN)/python -m bench page

# An environment of its own, of pure Python: what builds the pages imports nothing of the package, and needs no torch.
$(SITE)/.ready: constraints-docs.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install -c constraints-docs.txt mkdocs-material
	touch $@

site: $(SITE)/.ready
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html"

cases: $(STAMP)
	@if [ -f "$(CASES)" ]; then $(BIN)/python "$(CASES)" $(ARGS); \
	else echo "no cases at $(CASES); say where: make cases CASES=path/to/run.py"; fi

bench-s4: $(STAMP)
	$(BIN)/python -m bench seeds --only S4 $(ARGS)

bench-peers: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[peers]'
	$(BIN)/python -m bench peers $(ARGS)
