"""Start and stop the systems that a benchmark compares: frontends and simulated workers, processes on loopback."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_LIMIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What runs. `pids` is what the load generator wants: names and process ids."""

    name: str
    urls: tuple[str, ...]  # of its frontends
    frontend_pids: tuple[int, ...]
    worker_pids: tuple[int, ...]

    @property
    def url(self) -> str:
        """All of them, as the load generator takes them."""
        return ",".join(self.urls)

    @property
    def pids(self) -> str:
        frontends, workers = ("+".join(map(str, p)) for p in (self.frontend_pids, self.worker_pids))
        return f"fe={frontends},wk={workers}"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def generate_load(arguments: Sequence[str], what: str) -> dict[str, Any]:
    """The load generator's figures; ends the benchmark, naming `what` was asked, at the first error."""
    command = [sys.executable, str(Path(__file__).parent / "load.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what}: the load generator failed: {done.stderr[-500:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    if row["errs"]:
        raise SystemExit(f"{what}: {row['errs']} errors: {row['last_err']}")
    return row


@contextlib.contextmanager
def running(
    name: str,
    python: str,
    model: Path,
    worker_flags: Sequence[str] = (),
    frontend_flags: Sequence[str] = (),
    *,
    num_workers: int = 1,
    num_frontends: int = 1,
    checkout: Path | None = None,
) -> Iterator[System]:
    """Run the system while the block runs. `python` decides which: ours, or one with the real Dynamo installed.

    With `checkout`, the code of that other checkout of ours is run.
    """
    ports = [free_port() for _ in range(num_frontends)]
    serve = ["--model-path", str(model), "--model-name", "m", *worker_flags]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        environ = environment(python, directory, checkout)
        log = Path(directory) / "log"
        output = stack.enter_context(log.open("w"))

        def start(module: str, flags: Sequence[str]) -> "subprocess.Popen[bytes]":
            return launch(stack, [python, "-m", module, *flags], environ, output)

        frontends = [
            start("dynamo.frontend", ["--http-port", str(port), *frontend_flags]) for port in ports
        ]
        workers = [start("dynamo.mocker", serve) for _ in range(num_workers)]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        for url in urls:
            wait_for_workers(url, num_workers, [*frontends, *workers], log)
        yield System(
            name=name,
            urls=urls,
            frontend_pids=tuple(process.pid for process in frontends),
            worker_pids=tuple(process.pid for process in workers),
        )


def start_frontend_s(python: str, checkout: Path | None = None) -> float:
    """Return the seconds from the start of a frontend without workers to its first answer."""
    port = free_port()
    command = [python, "-m", "dynamo.frontend", "--http-port", str(port)]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        log = stack.enter_context((Path(directory) / "log").open("w"))
        begun = time.monotonic()
        process = launch(stack, command, environment(python, directory, checkout), log)
        while process.poll() is None and time.monotonic() < begun + READY_LIMIT_S:
            if _answers(f"http://127.0.0.1:{port}/health"):
                return time.monotonic() - begun
            time.sleep(0.002)
        raise SystemExit(f"no frontend:\n{(Path(directory) / 'log').read_text()[-2000:]}")


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True  # without workers it is up, and unhealthy
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def environment(python: str, directory: str, checkout: Path | None = None) -> dict[str, str]:
    """Return the environment of all processes of one system, which find each other and no other processes."""
    environ = os.environ | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": directory,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_HTTP_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }
    # A checkout keeps its bytecode as an installed package does: pip compiles what it installs, as the peer. Without it
    # a start takes twice the processor time, and 1.5 MB more stay in memory.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if python != sys.executable:
        environ.pop("PYTHONPATH", None)  # the other system must not find ours
    if checkout is not None:
        environ["PYTHONPATH"] = str(checkout.resolve() / "src")
    return environ


def launch(
    stack: contextlib.ExitStack, command: list[str], environ: dict[str, str], log: object
) -> "subprocess.Popen[bytes]":
    """A process that ends with the stack."""
    # The working directory must not hold either system's source: both are imported as `dynamo`.
    process = subprocess.Popen(
        command, env=environ, stdout=log, stderr=log, cwd=tempfile.gettempdir()
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for_workers(
    url: str,
    num_workers: int,
    processes: Sequence["subprocess.Popen[bytes]"],
    log: Path,
    limit_s: float = READY_LIMIT_S,
) -> None:
    """Until the frontend lists the model, and that many who serve it; with 0, until whoever is there lists it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            raise SystemExit(f"a process of the benchmark ended early:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(OSError):  # no answer yet, or none in time
            is_listed = b'"m"' in fetch(f"{url}/v1/models")
            if is_listed and fetch(f"{url}/health").count(b'"endpoint":"generate"') >= num_workers:
                return
        time.sleep(0.1)
    raise SystemExit(f"no model after {limit_s} s:\n{log.read_text()[-2000:]}")


def fetch(url: str) -> bytes:
    """What a GET brings."""
    with urllib.request.urlopen(url, timeout=2) as answer:
        body: bytes = answer.read()
        return body
