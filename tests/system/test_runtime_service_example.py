"""The example service of a user: real processes that find each other in a directory."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

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
