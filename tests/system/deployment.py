"""Real processes for stories: started with ports and a discovery directory of their own, always cleaned up."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
from hosts import Host

import ports
import processes
from dynamo.base import addresses
from waiting import PATIENT_S, eventually

MODEL = "storyteller"
GRACE_S = 10.0  # for a process that its test needs no more; then it is killed
# For tests that count what becomes of requests: on a busy machine no worker is given up for its silence.
UNHURRIED = {"DYN_REQUEST_SILENCE_SECS": "60"}


class Process:
    """A child and its log."""

    def __init__(
        self,
        argv: list[str],
        environ: dict[str, str],
        log: pathlib.Path,
        host: Host | None = None,
    ) -> None:
        self.log = log
        self.may_end = False  # the story wants it to
        if host is not None:
            argv = [*host.argv, *argv]
            environ = environ | {"DYN_TCP_RPC_HOST": host.address, "DYN_SYSTEM_HOST": host.address}
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                processes.bind(argv, "TERM"),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def check(self) -> None:
        """Fail now, and with its log, if it has died by itself."""
        assert self.may_end or self.is_running, self.log.read_text()

    def signal(self, number: int) -> None:
        self.may_end = True
        if number == signal.SIGSTOP:
            processes.freeze(self.popen.pid)
        else:
            self.popen.send_signal(number)

    def kill(self) -> None:
        self.may_end = True
        self.popen.kill()
        self.popen.wait()

    def kill_all(self) -> None:
        """It, and the processes of its engine."""
        below = processes.descendants(self.pid)
        self.kill()
        processes.kill(below)

    def exit_code(self, within_s: float = PATIENT_S) -> int:
        return self.popen.wait(within_s)

    def end(self) -> None:
        """Politely, then not."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            try:
                self.popen.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.kill()


class Frontend(Process):
    """A frontend, and questions to it."""

    def __init__(
        self,
        port: int,
        environ: dict[str, str],
        log: pathlib.Path,
        *flags: str,
        host: Host | None = None,
    ) -> None:
        address = host.address if host else "127.0.0.1"
        argv = [sys.executable, "-m", "dynamo.frontend", "--http-host", address]
        super().__init__([*argv, "--http-port", str(port), *flags], environ, log, host)
        self.url = f"http://{addresses.join(address, port)}"
        self.others: list[Process] = []  # of the same story

    def models(self) -> list[str]:
        try:
            answer = httpx.get(f"{self.url}/v1/models", timeout=PATIENT_S)
        except httpx.TransportError:
            return []
        return [model["id"] for model in answer.json()["data"]]

    def is_live(self) -> bool:
        try:
            return httpx.get(f"{self.url}/live", timeout=PATIENT_S).status_code == 200
        except httpx.TransportError:
            return False

    def await_models(self, expected: list[str], within_s: float = PATIENT_S) -> float:
        def is_so() -> bool:
            for process in (self, *self.others):
                process.check()
            return self.models() == expected

        return eventually(is_so, within_s=within_s, what=f"{expected} at {self.url}")

    def await_workers(self, number: int) -> None:
        """Wait until the frontend knows so many workers of the model; it lists the model with the first of them."""
        series = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
        eventually(
            lambda: self.is_live() and self.metric(series) == number, what=f"{number} workers"
        )

    def chat(self, text: str = "Tell me a story", **fields: object) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=chat(text, **fields), timeout=PATIENT_S
        )

    def metric(self, series: str) -> float:
        """The value of this name with these labels; 0 as long as there is none."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENT_S).text
        rows = (row.rpartition(" ") for row in text.splitlines())
        return next((float(value) for name, _, value in rows if name == series), 0.0)

    @contextlib.contextmanager
    def stream(self, text: str = "Tell me a story", **fields: object) -> Iterator[Iterator[str]]:
        """The data lines of a streamed answer; leaving the block closes the connection."""
        body = chat(text, stream=True, **fields)
        with (
            httpx.Client(timeout=PATIENT_S) as client,
            client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            yield (line.removeprefix("data: ") for line in lines if line.startswith("data: "))


def chat(text: str, **fields: object) -> dict[str, object]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


class Worker(Process):
    """A worker with a system port."""

    def __init__(
        self,
        engine: str,
        environ: dict[str, str],
        log: pathlib.Path,
        *flags: str,
        host: Host | None = None,
    ) -> None:
        port = ports.reserve()
        argv = [sys.executable, "-m", f"dynamo.{engine}", "--system-port", str(port), *flags]
        super().__init__(argv, environ, log, host)
        self.url = f"http://{addresses.join(host.address if host else '127.0.0.1', port)}"

    def metrics(self) -> str:
        """All metrics, once the worker has any: discovery lists it a moment before its system port shows them."""
        answers = []

        def has_started() -> bool:
            answers.append(httpx.get(f"{self.url}/metrics", timeout=PATIENT_S))
            return answers[-1].status_code != 503

        eventually(has_started, what="the system port shows metrics")
        assert answers[-1].status_code == 200, answers[-1].text
        return answers[-1].text

    def metric(self, name: str) -> float:
        """The value of `dynamo_component_{name}`, summed over its labels."""
        text = self.metrics()
        rows = [row for row in text.splitlines() if row.startswith(f"dynamo_component_{name}")]
        assert rows, f"no metric {name} in {text}"
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    def num_requests(self) -> int:
        """The requests that it has taken, by its log, which can be read however busy the worker is."""
        return self.log.read_text().count("Added request")

    def rss_bytes(self) -> int:
        return rss_bytes(self.pid)


@contextlib.contextmanager
def newly_asked(workers: list[Worker]) -> Iterator[Callable[[], Worker]]:
    """Give a function that returns the first of `workers` that has taken a request since the block began."""
    before = {worker: worker.num_requests() for worker in workers}

    def asked() -> list[Worker]:
        return [worker for worker in workers if worker.num_requests() > before[worker]]

    def first() -> Worker:
        eventually(asked, what="a worker has taken a request")
        return asked()[0]

    yield first


def rss_bytes(pid: int) -> int:
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Deployment:
    """What one story starts."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._processes: list[Process] = []
        self.environ = dict(os.environ) | {
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYNAMO_HOME": str(directory / "home"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def frontend(self, *flags: str, port: int | None = None, host: Host | None = None) -> Frontend:
        log = self._log("frontend")
        return self._keep(Frontend(port or ports.reserve(), self.environ, log, *flags, host=host))

    def mocker(self, *flags: str, host: Host | None = None) -> Worker:
        """A simulated worker with the built-in model's tokenizer."""
        return self._keep(Worker("mocker", self.environ, self._log("mocker"), *flags, host=host))

    def native(self, *flags: str, host: Host | None = None) -> Worker:
        return self._keep(Worker("native", self.environ, self._log("native"), *flags, host=host))

    def vllm(self, *flags: str) -> Worker:
        environ = self.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # there are several
        }
        return self._keep(Worker("vllm", environ, self._log("vllm"), *flags))

    def run(self, *argv: str) -> Process:
        """Any other command of ours, as `python -m ...`."""
        command = [sys.executable, "-m", *argv]
        return self._keep(Process(command, self.environ, self._log("command")))

    def run_in(self, directory: pathlib.Path, *argv: str) -> Process:
        """Likewise, where relative paths mean something else than to the others."""
        command = ["env", "-C", str(directory), sys.executable, "-m", *argv]
        return self._keep(Process(command, self.environ, self._log("command")))

    def run_shell(self, line: str) -> Process:
        """A line that was printed to be pasted, from a directory that it does not expect."""
        return self._keep(
            Process(["bash", "-c", f"cd / && {line}"], self.environ, self._log("command"))
        )

    def end(self) -> None:
        for process in reversed(self._processes):
            process.end()

    def _log(self, name: str) -> pathlib.Path:
        return self._directory / f"{name}-{len(self._processes)}.log"

    def _keep(self, process):
        self._processes.append(process)
        return process
