# Everything a person or CI runs. Needs Python >= 3.11 and make; sets up .venv by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.runtime
DEV := $(VENV)/.dev
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo check format test chaos soak-router docs docs-reference docs-metrics test-observability test-otel test-data test-kill test-helm render-helm test-drain test-page test-slowhttp test-varnish test-timing test-flood test-bugs sbom audit test-vllm \
  test-vllm-long test-sglang test-reference test-engine test-schemathesis fuzz soak \
  gpu-check grid audit-timing bench-live bench bench-router bench-request bench-chunk bench-streams bench-history bench-processes bench-prompt bench-engine bench-tiers bench-transfer bench-check bench-profile \
  bench-publish bench-quick bench-peers bench-native bench-index bench-fleet native lock clean

help: ## Show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(RUN): requirements/runtime.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  f"warmroute needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Set PYTHON=...")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the locked packages"
	@$(PIP) install --require-hashes -r requirements/runtime.lock
	@$(PIP) install --require-hashes -r requirements/build.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m warmroute.native >/dev/null 2>&1 || echo "no C compiler: helpers are not built, everything works without them"
	@touch $@

$(DEV): requirements/dev.lock $(RUN)
	@echo "installing the locked development packages"
	@$(PIP) install --require-hashes -r requirements/dev.lock
	@touch $@

setup: $(RUN) ## Install into .venv what running needs

demo: $(RUN) ## Compare routing policies on a local fleet (no GPU, no Redis needed)
	@$(BIN)/warmroute demo $(ARGS)

check: $(DEV) ## Lint, format, import rules, layout, strict types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python tests/support/layout.py
	@$(BIN)/mypy .

format: $(DEV) ## Rewrite the sources as the formatter wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: $(DEV) ## All tests on generated fixtures
	@$(BIN)/python -m pytest -m "not data and not heavy"

docs-reference: $(DEV) docs-metrics ## Make docs/config.md and docs/cli.md (and metrics.md) from the code
	@PYTHONPATH=.:tests $(BIN)/python -m support.config_page docs/config.md
	@PYTHONPATH=.:tests $(BIN)/python -m support.cli_page docs/cli.md

docs: build/docs/.installed ## The documentation as a site, in build/site (strict; needs no network to read)
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --quiet --strict -f website/mkdocs.yml

build/docs/.installed: requirements/docs.lock
	@echo "installing MkDocs into build/docs"
	@rm -rf build/docs && $(PYTHON) -m venv build/docs
	@build/docs/bin/pip --disable-pip-version-check --quiet install --require-hashes -r requirements/docs.lock
	@touch $@

docs-metrics: $(DEV) ## Make the tables of docs/metrics.md from the code
	@PYTHONPATH=.:tests $(BIN)/python -m support.metric_page docs/metrics.md

test-observability: $(DEV) ## promtool on the rules and their tests; a real Prometheus asks all of alerts and dashboard (1 min)
	@$(BIN)/python -m pytest -m heavy tests/tool/test_prometheus.py

test-otel: $(DEV) build/otel/.installed ## Traces at a real OTLP/HTTP receiver (the extra otel, installed into build/otel)
	@PYTHONPATH=build/otel $(BIN)/python -m pytest -m heavy tests/otel

build/otel/.installed: pyproject.toml
	@echo "installing the extra otel into build/otel"
	@$(PIP) install --upgrade --target build/otel 'opentelemetry-sdk>=1.30,<2' 'opentelemetry-exporter-otlp-proto-http>=1.30,<2'
	@touch $@

test-data: $(DEV) ## Tests on the shared data (WARMROUTE_TEST_DATA, default ../shared/data)
	@$(BIN)/python -m pytest -m "data and not heavy"

test-kill: $(DEV) ## 200 seeded kill points over every process (slow)
	@$(BIN)/python -m pytest -m heavy -k kill

build/page/.done: requirements/page.lock $(DEV)
	@rm -rf build/page && mkdir -p build/page
	@$(PIP) install --require-hashes --target build/page -r requirements/page.lock
	@npm pack --silent --pack-destination build/page axe-core@4.14.1 >/dev/null
	@touch $@

test-page: $(DEV) ## The dashboard in a real Chromium, with pictures for docs/images (needs chromium, npm; 5 min)
	@command -v $${WARMROUTE_CHROMIUM:-chromium} >/dev/null || { echo "no chromium: apt-get install chromium, or set WARMROUTE_CHROMIUM to its path"; exit 1; }
	@command -v npm >/dev/null || { echo "npm is not here: it fetches axe-core, which checks accessibility"; exit 1; }
	@$(MAKE) --no-print-directory build/page/.done
	@PYTHONPATH=build/page $(BIN)/python -m pytest -m heavy tests/page

test-slowhttp: $(DEV) ## Slow heads, bodies and readers of slowhttptest (some 2 minutes)
	@command -v slowhttptest >/dev/null || { echo "slowhttptest is not here: apt-get install slowhttptest, or brew install slowhttptest"; exit 1; }
	@$(BIN)/python -m pytest -m heavy -rP tests/tool/test_slowhttp.py

test-varnish: $(DEV) ## The scripts of tests/varnish: varnishtest as client and replica
	@command -v varnishtest >/dev/null || { echo "varnishtest is not here: apt-get install varnish, or brew install varnish"; exit 1; }
	@$(BIN)/python -m pytest -m heavy tests/tool/test_varnish.py

test-state: $(DEV) ## Eight routers, two primaries, a million blocks, clocks apart (WARMROUTE_FAKETIME=/path/to/libfaketime.so.1)
	@$(BIN)/python -m pytest -m heavy tests/contract tests/e2e/test_state_herd.py tests/e2e/test_herd.py

chaos: $(DEV) ## Every fault of tests/chaos once, in the order of a seed (CHAOS="--seed N --minutes M --only C-01,C-11")
	@PYTHONPATH=.:tests $(BIN)/python -m chaos.run $(CHAOS)

soak-router: $(DEV) ## Two routers under load for SOAK_MINUTES (60) at SOAK_RATE (200/s), a fault every 20 s
	@PYTHONPATH=.:tests $(BIN)/python -m chaos.soak

test-helm: $(DEV) build/helm/.installed ## The chart by helm itself, and against the schemas of Kubernetes
	@PYTHONPATH=.:tests $(BIN)/python -m support.helm fetch
	@$(BIN)/python -m pytest -m heavy tests/tool/test_helm.py

render-helm: $(DEV) ## deploy/kubernetes/warmroute.yaml again from the chart
	@PYTHONPATH=.:tests $(BIN)/python -m support.helm render

build/helm/.installed:
	@echo "installing kubernetes-validate into build/helm"
	@$(PYTHON) -m venv build/helm
	@build/helm/bin/pip --disable-pip-version-check --quiet install 'kubernetes-validate==1.37.*'
	@touch $@

native: $(RUN) ## Compile the helpers for index and words again (CC); setting up does it where there is a compiler
	@$(BIN)/python -m warmroute.native

test-drain: $(DEV) ## Ten restarts of one of two routers under load
	@$(BIN)/python -m pytest -m heavy tests/e2e/test_drain.py

test-timing: $(DEV) ## Whether the time of a refusal tells of a key
	@$(BIN)/python -m pytest -m heavy -rP tests/unit/test_gate_timing.py

test-bugs: $(DEV) ## Seeded bugs, one at a time: does a test fail for each? (BUGS="--fast" or "--only TEXT"; 10 min)
	@PYTHONPATH=.:tests $(BIN)/python -m bugs.run $(BUGS)

sbom: $(DEV) ## A bill of materials (CycloneDX) of what running needs: build/sbom.json
	@PYTHONPATH=.:tests $(BIN)/python -m support.sbom build/sbom.json

audit: build/audit/.installed ## Known vulnerabilities of the locked packages (asks the package index)
	@build/audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/runtime.lock

build/audit/.installed:
	@echo "installing pip-audit into build/audit"
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/pip --disable-pip-version-check --quiet install 'pip-audit>=2.9,<3'
	@touch $@

test-flood: $(DEV) ## What one tenant's flood costs another, by the engine's eviction (10 min)
	@$(BIN)/python -m pytest -m heavy -rP tests/e2e/test_tenant_quota.py

test-vllm: $(DEV) ## Two real vLLM engines, and the worker the same way (WARMROUTE_VLLM=/path/to/vllm; slow)
	@$(BIN)/python -m pytest -m heavy -rP tests/vllm --ignore=tests/vllm/test_long_run.py

test-vllm-long: $(DEV) ## The same for 20 minutes of real text, restarts, resets, salts (WARMROUTE_LONG_MINUTES=20)
	@$(BIN)/python -m pytest -m heavy -rP tests/vllm/test_long_run.py

test-sglang: $(DEV) ## Two real SGLang servers on the CPU (WARMROUTE_SGLANG=/path/to/environment of tests/sglang/install.py; slow)
	@$(BIN)/python -m pytest -m heavy -rP tests/sglang

test-reference: $(DEV) ## The worker's logits beside transformers' (WARMROUTE_VLLM=/path/to/vllm; slow)
	@$(BIN)/python -m pytest -m heavy -rP tests/reference

test-engine: $(DEV) ## The worker's torch runner (WARMROUTE_ENGINE=/path/to/environment with torch; slow)
	@$(BIN)/python -m pytest -m heavy tests/engine

test-schemathesis: $(DEV) build/schemathesis/.installed ## schemathesis against a router and a worker, by /openapi.json (SCHEMA="--examples 300")
	@PYTHONPATH=.:tests $(BIN)/python -m support.schema_run --schemathesis build/schemathesis/bin/st $(SCHEMA)

build/schemathesis/.installed:
	@echo "installing schemathesis into build/schemathesis"
	@$(PYTHON) -m venv build/schemathesis
	@build/schemathesis/bin/pip --disable-pip-version-check --quiet install 'schemathesis>=4,<5'
	@touch $@

fuzz: build/fuzz/.installed ## Fuzz what reads foreign bytes, by coverage (FUZZ="--seconds 60 --target sse"; CPython with an atheris wheel)
	@PYTHONPATH=.:tests build/fuzz/bin/python -m support.fuzz $(FUZZ)

build/fuzz/.installed: requirements/runtime.lock
	@echo "installing atheris into build/fuzz"
	@$(PYTHON) -m venv build/fuzz
	@build/fuzz/bin/pip --disable-pip-version-check --quiet install --require-hashes -r requirements/runtime.lock
	@build/fuzz/bin/pip --disable-pip-version-check --quiet install --only-binary :all: 'atheris>=3,<4'
	@touch $@

soak: $(DEV) ## A million operations on the worker's pages (SOAK="--seed 7 --operations 1000000")
	@PYTHONPATH=.:tests $(BIN)/python -m support.soak $(SOAK)

gpu-check: $(DEV) ## Token identity and throughput on a GPU (WARMROUTE_ENGINE=/path/to/environment)
	@$(or $(WARMROUTE_ENGINE:%=%/bin/python),$(BIN)/python) bench/gpu_check.py --page docs/engine.md

bench: $(DEV) ## Every figure beside its budget and peers, with JSON and charts (BENCH="--last"; half an hour)
	-@$(if $(findstring --last,$(BENCH)),,$(MAKE) --no-print-directory bench-native)
	-@$(if $(findstring --last,$(BENCH)),,$(BIN)/python bench/peers/install.py)
	@$(BIN)/python bench/summary.py $(BENCH)

bench-check: $(DEV) ## Did a ratio of bench/reference.json get worse? (CHECK="--last --update"; 15 minutes)
	-@$(if $(findstring --last,$(CHECK)),,$(MAKE) --no-print-directory bench-native)
	@$(BIN)/python bench/check.py $(CHECK)

bench-profile: $(DEV) ## Flame graphs of the router's own code, into docs/images (PROFILE="--only 32,chunk")
	@$(BIN)/python bench/flame_bench.py $(PROFILE)

bench-router: bench-native ## CPU per request and chunk, latency, memory, beside the peers
	-@$(BIN)/python bench/peers/install.py
	@$(BIN)/python bench/router_bench.py

bench-history: bench-native ## CPU against the length of the history; how long the loop is held
	@$(BIN)/python bench/history_bench.py

bench-request: $(DEV) ## The router's own code per request, by stage, without sockets (REQUEST="--stages")
	@$(BIN)/python bench/request_bench.py $(REQUEST)

bench-chunk: $(DEV) ## The router's own code per streamed chunk, without sockets (CHUNK="--parsed")
	@$(BIN)/python bench/chunk_bench.py $(CHUNK)

bench-streams: bench-native ## 10,000 open streams: memory of each, delay and CPU of a chunk, loop lag (STREAMS="--rounds 1")
	@$(BIN)/python bench/streams_bench.py $(STREAMS)

bench-processes: bench-native ## Two router processes against one: CPU per request; the time of a start
	@$(BIN)/python bench/process_bench.py

bench-prompt: $(DEV) ## Reading prompts alone (PROMPT="--speeds": tokens per second only)
	@$(BIN)/python bench/prompt_bench.py $(PROMPT)

bench-index: $(DEV) ## The index: memory, events, lookups, by form (INDEX="0.25 --parts memory,lookups"; minutes)
	@$(BIN)/python bench/index_bench.py $(INDEX)

bench-fleet: $(DEV) ## What 10, 100 and 1,000 replicas cost a router at rest (FLEET="2000": instead of 1,000)
	@$(BIN)/python bench/fleet_bench.py $(FLEET)

bench-engine: ## The worker's runners beside transformers (WARMROUTE_ENGINE=/path/to/environment)
	@$(WARMROUTE_ENGINE)/bin/python bench/engine_bench.py

grid: $(DEV) ## Every policy on the shared traces, resumable (GRID="--requests 3000 --minutes 30"; hours in full)
	@$(BIN)/python bench/grid.py $(GRID)

audit-timing: $(DEV) ## Can a tenant time what another one sent? (AUDIT="--only engines --repeats 2"; an hour and more)
	@$(BIN)/python bench/timing_audit.py $(AUDIT)

bench-live: $(DEV) ## Live replay beside round robin and vllm-router (WARMROUTE_VLLM=/path/to/vllm; slow)
	@$(BIN)/python bench/live_bench.py --engines $(if $(WARMROUTE_VLLM),vllm,worker) $(LIVE)

bench-tiers: $(DEV) ## The worker with and without tiers and transfer (some 5 minutes)
	@$(BIN)/python bench/tier_bench.py

bench-transfer: $(DEV) ## Pages over loopback and on disk
	@$(BIN)/python bench/transfer_bench.py

bench-publish: $(DEV) ## Put the tables of the last benches into docs/
	@$(BIN)/python bench/publish.py docs/performance.md docs/tiers.md docs/engine.md

bench-quick: bench-native ## The same with small amounts: does the bench work?
	@$(BIN)/python -m pytest -q -m heavy tests/e2e/test_bench_native.py
	@$(BIN)/python bench/summary.py --quick
	@$(BIN)/python bench/tier_bench.py --quick

bench-peers: $(DEV) ## Install the peers below build/peers (WARMROUTE_PEERS), each in its own environment
	@$(BIN)/python bench/peers/install.py

bench-native: $(DEV) build/bench/stub build/bench/load ## Compile the stub replicas and the load generator (Linux)

build/bench/%: bench/csrc/%.c bench/csrc/wire.h
	@command -v $(CC) >/dev/null || { echo "the bench needs a C compiler: $(CC) is not there; set CC=..."; exit 1; }
	@mkdir -p $(@D)
	@$(CC) -O2 -Wall -Wextra -o $@ $< -lm

lock: $(DEV) ## Resolve the lock files again (asks the package index)
	@$(PIP) install uv
	@$(BIN)/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header pyproject.toml -o requirements/runtime.lock
	@$(BIN)/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header pyproject.toml -c requirements/runtime.lock --group dev -o requirements/dev.lock
	@printf 'hatchling\neditables\n' | $(BIN)/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --no-header -c requirements/dev.lock - -o requirements/build.lock
	@printf 'mkdocs-material\n' | $(BIN)/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --no-header - -o requirements/docs.lock
	@printf 'playwright\n' | $(BIN)/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --no-header - -o requirements/page.lock

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
