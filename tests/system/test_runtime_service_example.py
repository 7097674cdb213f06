"""The example service of a user: real processes that find each other in a directory."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import ports
from waiting import PATIENT_S

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "runtime_service"

pytestmark = pytest.mark.system


@pytest.fixture
def environ(tmp_path):
    own = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    source = str(pathlib.Path(__file__).parents[2] / "src")
    return {**own, "DYN_FILE_KV": str(tmp_path / "kv"), "PYTHONPATH": source}


def test_client_of_the_example_gets_the_answer_of_its_server(environ):
    with subprocess.Popen([sys.executable, EXAMPLE / "server.py"], env=environ) as server:
        try:
            answer = subprocess.run(
                [sys.executable, EXAMPLE / "client.py", "Ada", "Grace"],
                env=environ,
                capture_output=True,
                text=True,
                timeout=PATIENT_S,
                check=True,
            )
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(PATIENT_S)

    assert answer.stdout.split() == ["Hello,", "Ada", "Hello,", "Grace"]
    assert code == 0


# In the form of NVIDIA Dynamo's own example, server and client in one process.
HELLO_WORLD = """
import asyncio
from dynamo.runtime import DistributedRuntime, dynamo_endpoint, dynamo_worker

class RequestHandler:
    @dynamo_endpoint(str, str)
    async def generate(self, request):
        for word in request.split(","):
            yield f"Hello {word}!"

@dynamo_worker(static=False)
async def worker(runtime: DistributedRuntime):
    component = runtime.namespace("hello_world").component("backend")
    await component.create_service()
    endpoint = component.endpoint("generate")
    serving = asyncio.create_task(endpoint.serve_endpoint(RequestHandler().generate))
    client = await endpoint.client()
    await client.wait_for_instances()
    async for item in await client.generate("world,sun"):
        print(item.data())
    serving.cancel()

asyncio.run(worker())
"""


def test_service_that_is_written_for_nvidia_dynamo_runs(environ):
    answer = subprocess.run(
        [sys.executable, "-c", HELLO_WORLD],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )

    assert (answer.stdout.splitlines(), answer.stderr) == (["Hello world!", "Hello sun!"], "")
    assert answer.returncode == 0


# In the form of version 1: an endpoint by its path, the logs, and all that `serve_endpoint` takes.
VERSION_1 = """
import asyncio
import logging
import os
import urllib.request
from dynamo.runtime import DistributedRuntime, dynamo_worker
from dynamo.runtime.logging import configure_dynamo_logging

logger = logging.getLogger("my_service")
configure_dynamo_logging(service_name="backend")

async def generate(request, context):
    logger.info("Received request: %s", request)
    yield f"Hello {request}!"

def read(path):
    url = f"http://127.0.0.1:{os.environ['DYN_SYSTEM_PORT']}{path}"
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()

async def profile(body):
    return {"status": "ok"}

@dynamo_worker(enable_nats=False)
async def worker(runtime: DistributedRuntime):
    runtime.register_engine_route("profile", profile)
    endpoint = runtime.endpoint("hello_world.backend.generate")
    serving = asyncio.create_task(
        endpoint.serve_endpoint(
            generate,
            graceful_shutdown=False,
            metrics_labels=[("model", "mine")],
            health_check_payload={"prompt": "well?"},
        )
    )
    client = await endpoint.client()
    await client.wait_for_instances()
    async for item in await client.generate("world"):
        print(item.data())
    while '"generate":"ready"' not in await asyncio.to_thread(read, "/health"):
        await asyncio.sleep(0.01)
    print(await asyncio.to_thread(read, "/engine/profile"))
    metrics = await asyncio.to_thread(read, "/metrics")
    print([line for line in metrics.splitlines() if "requests_total{" in line])
    runtime.shutdown()
    await serving

async def main():
    await worker()

asyncio.run(main())
"""


def test_service_that_is_written_for_version_1_runs(environ):
    answer = subprocess.run(
        [sys.executable, "-c", VERSION_1],
        env={**environ, "DYN_SYSTEM_PORT": str(ports.reserve()), "DYN_HEALTH_CHECK_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )

    assert (answer.returncode, answer.stdout.splitlines()) == (
        0,
        [
            "Hello world!",
            '{"status":"ok"}',
            "['dynamo_component_requests_total{"
            'dynamo_component="backend",dynamo_endpoint="generate",dynamo_namespace="hello_world",model="mine"} 1.0'
            "']",
        ],
    ), answer.stderr
    (line,) = answer.stderr.splitlines()
    assert line.endswith("[backend] Received request: world")


# In the form of Dynamo's page of examples for its router.
ROUTER = """
import asyncio
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime, dynamo_worker

@dynamo_worker()
async def worker(runtime: DistributedRuntime):
    endpoint = runtime.endpoint("dynamo.backend.generate")
    router = KvRouter(endpoint, block_size=64, kv_router_config=KvRouterConfig())
    tokens = list(range(100, 164))
    stream = await router.generate(tokens, model="m", stop_conditions={"max_tokens": 3, "ignore_eos": True})
    items = [item async for item in stream]
    print(sum(len(item["token_ids"]) for item in items), items[-1]["finish_reason"])
    while not (await router.best_worker(tokens))[2]:
        await asyncio.sleep(0.01)  # so that the event of the stored block is read
    worker_id, dp_rank, num_blocks = await router.best_worker(tokens)
    print([worker_id] == await (await endpoint.client()).wait_for_instances(), dp_rank, num_blocks)

worker()
"""


def test_service_routes_to_the_workers_of_a_model(environ):
    with subprocess.Popen([sys.executable, "-m", "dynamo.mocker"], env=environ) as mocker:
        try:
            answer = subprocess.run(
                [sys.executable, "-c", ROUTER],
                env=environ,
                capture_output=True,
                text=True,
                timeout=PATIENT_S,
                check=False,
            )
        finally:
            mocker.send_signal(signal.SIGTERM)
            mocker.wait(PATIENT_S)

    assert answer.stdout.splitlines() == ["3 length", "True 0 1"], answer.stderr


def test_public_face_of_the_runtime_imports_nothing_until_a_name_is_used(environ):
    program = (
        "import sys, dynamo.runtime; assert 'asyncio' not in sys.modules;"
        "print(dynamo.runtime.DistributedRuntime.__module__)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=True,
    )

    assert answer.stdout.strip() == "dynamo.runtime.component"
