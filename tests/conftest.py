"""Settings of every test: examples of properties have no deadline, because the machine may be busy.

Assertions of suites that several modules import are rewritten as those of their own tests. httpx reads the certificates
of the system for every request that is made without a client, 44 ms of processor time; here it does so once.

What a module has left open (a socket, a coroutine) is found when it ends, and reported there: Python's own collection
of garbage would report it in whatever test runs then.
"""

import functools
import gc
import os
import sys

import hypothesis
import pytest
from httpx._transports import default

from dynamo.launch import guard

collect_ignore = ["clients"]  # have an environment and settings of their own (`make test-clients`)

pytest.register_assert_rewrite("engine_suite", "sleeper_suite")

# The same examples in each run; `make test-properties` looks for others.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("fixed")

default.create_ssl_context = functools.cache(default.create_ssl_context)


def pytest_collection_finish(session):
    gc.freeze()  # the modules themselves are no garbage, and need not be looked through


@pytest.fixture(autouse=True, scope="session")
def guarded_processes():
    """What tests start ends with this process, also if that is killed, or ended by `timeout`."""
    with guard.Guard() as guardian:
        os.environ |= guardian.mark({})
        yield


@pytest.fixture(autouse=True, scope="module")
def collected_garbage():
    yield
    gc.collect()


# Under `make coverage`, what pytest's own process does for these modules does not count: tracing makes it two to four
# times as expensive, and other tests reach the same lines. Nor does what it does for tests of processes.
_UNTRACED = {
    "test_engine_llamacpp",
    "test_operator_service",
    "test_simulation",
}
# Of the processes, those of these modules count; tracing makes each process half as expensive again.
_TRACED = {
    "test_dynamo_run",
    "test_dynamo_serve",
    "test_endpoint_picker",
    "test_http_worker_processes",
    "test_kube_cluster",
    "test_kubernetes_articles",
    "test_kubernetes_updates",
    "test_operator_process",
    "test_planner",
    "test_profiler",
    "test_sdk_graphs",
    "test_semantic_gateway",
    "test_worker_commands",
}


@pytest.fixture(autouse=True, scope="module")
def traced_processes(request):
    settings = os.environ.get("COVERAGE_PROCESS_CONFIG")
    if settings is None or request.module.__name__.rpartition(".")[2] in _TRACED:
        yield
        return
    del os.environ["COVERAGE_PROCESS_CONFIG"]
    yield
    os.environ["COVERAGE_PROCESS_CONFIG"] = settings


@pytest.fixture(autouse=True, scope="module")
def traced_lines(request):
    coverage = sys.modules.get("coverage")
    tracer = coverage and coverage.Coverage.current()
    path = request.path
    if tracer is None or (path.stem not in _UNTRACED and path.parent.name != "system"):
        yield
        return
    tracer.stop()
    yield
    tracer.start()
