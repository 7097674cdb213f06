"""A real `dynamo serve`, and the commands of clients, which run in environments without our code."""

import contextlib
import os
import pathlib
import subprocess
import urllib.request

import pytest

import ports
from waiting import PATIENT_S, eventually

REPOSITORY = pathlib.Path(__file__).parents[2]
CLIENTS = REPOSITORY / ".venv-clients"


class Server:
    """One `dynamo serve` on a port of its own."""

    def __init__(self, model, port):
        self.model = model
        self.grpc_port = ports.reserve()
        self.url = f"http://127.0.0.1:{port}"
        self.v1 = f"{self.url}/v1"


@contextlib.contextmanager
def serve(folder, model, *flags):
    server = Server(model, ports.reserve())
    log = folder / f"{model}.log"
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "TMPDIR": str(folder),
        "DYN_KSERVE_GRPC_SERVER": "true",
        "DYN_KSERVE_GRPC_PORT": str(server.grpc_port),
    }
    dynamo = REPOSITORY / ".venv" / "bin" / "dynamo"
    command = [dynamo, "serve", "--http-port", server.url.rpartition(":")[2]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--model-name", model, *flags], env=environ, stdout=output, stderr=output
        )

    def is_ready():
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{server.v1}/models", timeout=PATIENT_S) as answer:
                return f'"{model}"'.encode() in answer.read()
        except OSError:
            return False

    try:
        eventually(is_ready, what=f"{model} at {server.url}", every_s=0.2)
        yield server
    finally:
        process.terminate()
        process.wait(PATIENT_S)


def run_client(*command, timeout_s=2.5 * PATIENT_S, statuses=(0,), **environ):
    """Return what a client prints. It runs without our settings, and a failure shows all that it said."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        env={**inherited, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode in statuses, (
        f"{command[0]}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout + done.stderr


def find_client(pattern):
    """Return the path of a client's file in its environment, or skip the test if it is not installed."""
    path = next(CLIENTS.glob(pattern), None)
    if path is None:
        pytest.skip(f"{pattern} is not installed: tests/clients/install.sh {CLIENTS.name}")
    return path
