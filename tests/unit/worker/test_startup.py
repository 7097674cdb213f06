"""The start of a worker as its system port shows it, and what is taken for a standstill."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import httpx
import pytest

from dynamo.base import addresses, errors
from dynamo.testing import clock as virtual
from dynamo.worker import health, main, settings, startup
from waiting import PATIENT_S, eventually

MIB = 2**20


def get(port, path):
    """Return status and decoded body, (None, {}) where nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return None, {}


@pytest.fixture
def clock():
    return virtual.VirtualClock()


@pytest.fixture
def work():
    return {"done": startup.WorkDone()}


@pytest.fixture
def progress(clock, work):
    return startup.StartProgress(clock, 300.0, lambda: work["done"])


async def test_load_that_computes_or_reads_is_no_standstill(clock, work, progress):
    for done in (startup.WorkDone(4.0, 0), startup.WorkDone(4.0, 2 * MIB)):
        await clock.advance(299)
        work["done"] = done
        assert not progress.is_stalled()
    await clock.advance(299)
    assert not progress.is_stalled()
    await clock.advance(2)

    assert progress.is_stalled()
    assert progress.report() == {"stage": "load", "stillSecs": 301}


async def test_process_that_only_waits_does_not_move(clock, work, progress, caplog):
    for number in range(1, 32):
        await clock.advance(10)
        work["done"] = startup.WorkDone(number * 0.05, number * 1000)

    assert progress.is_stalled()
    assert progress.is_stalled()
    assert [record.getMessage() for record in caplog.records] == [
        "the load has stood still for 300 s: /live fails now, so that a supervisor starts this worker again"
    ]


async def test_download_moves_while_its_folder_grows_and_begins_after_what_was_left(
    clock, progress, tmp_path
):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "old.incomplete").write_bytes(bytes(700))
    progress.begin_download("org/m", tmp_path, 1000)
    (blobs / "new.incomplete").write_bytes(bytes(420))
    await clock.advance(299)

    assert progress.report() == {
        "stage": "download",
        "model": "org/m",
        "doneBytes": 420,
        "totalBytes": 1000,
        "stillSecs": 0,
    }
    await clock.advance(301)
    assert progress.is_stalled()
    (blobs / "new.incomplete").rename(blobs / "new")
    (blobs / "other.incomplete").write_bytes(bytes(100))  # of another process
    assert not progress.is_stalled()


async def test_download_of_twenty_minutes_is_shown_and_no_standstill(clock, progress, tmp_path):
    blob = tmp_path / "blobs" / "model.incomplete"
    blob.parent.mkdir()
    progress.begin_download("org/m", tmp_path, 1000)
    reports = []
    for done in range(200, 1001, 200):  # a piece every four minutes
        await clock.advance(240)
        assert not progress.is_stalled()
        blob.write_bytes(bytes(done))
        assert not progress.is_stalled()
        reports.append(progress.report())

    assert [report["doneBytes"] for report in reports] == [200, 400, 600, 800, 1000]
    assert {report["stillSecs"] for report in reports} == {0}
    await clock.advance(301)
    assert progress.is_stalled()


async def test_worker_that_serves_is_never_given_up(clock, progress):
    progress.finish()
    await clock.advance(1000)

    assert not progress.is_stalled()
    assert progress.report() is None


def test_work_of_child_processes_counts():
    before = startup.measure_processes()
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint('.', flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        during = startup.measure_processes()
        child.communicate(b"\n")

    assert during.cpu_s - before.cpu_s >= 0.2
    assert during.bytes_read > before.bytes_read


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_system_port_listens_at_an_address_of_ipv6_with_and_without_brackets(host, clock):
    progress = startup.StartProgress(clock, 60.0)
    with startup.early_port(host, addresses.ANY_PORT, progress) as start_port:
        assert start_port is not None
        assert start_port.release().getsockname()[0] == "::1"


def test_system_port_at_an_address_of_a_single_link_is_refused_by_name(clock):
    progress = startup.StartProgress(clock, 60.0)
    with (
        pytest.raises(errors.ConfigError, match="--system-host is 'fe80::1%eth0'"),
        startup.early_port("fe80::1%eth0", addresses.ANY_PORT, progress),
    ):
        pass


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/engine/role"), ("DELETE", "/v1/loras/poet")]
)
def test_command_for_a_worker_that_starts_is_refused_in_a_sentence(progress, method, path):
    listener = startup.open_listener("127.0.0.1", addresses.PortRange(0, 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
    early = startup.StartPort(listener, progress)
    answer = httpx.request(method, url, json={"role": "prefill"}, timeout=PATIENT_S)
    early.release().close()

    assert answer.status_code == 503
    assert "the worker starts" in answer.text


async def test_early_port_hands_its_socket_over_without_refusing_a_connection(clock):
    progress = startup.StartProgress(clock, 300.0)
    listener = startup.open_listener("127.0.0.1", addresses.PortRange(0, 0))
    port = listener.getsockname()[1]
    early = startup.StartPort(listener, progress)
    answers = [
        await asyncio.to_thread(get, port, path) for path in ("/live", "/health", "/metrics")
    ]
    early.release()
    waiting = asyncio.create_task(asyncio.to_thread(get, port, "/live"))  # between the two
    served = health.SystemPort(
        endpoints=("generate",), is_ready=lambda: False, uptime_s=lambda: 1.0, render=lambda: b""
    )
    await served.start_on(early.release())
    answers += [await waiting, await asyncio.to_thread(get, port, "/health")]
    await served.close()

    assert [status for status, _ in answers] == [200, 503, 503, 200, 503]
    assert answers[1][1]["startup"]["stage"] == "load"
    assert answers[3][1]["endpoints"] == {"generate": "notready"}


def test_slow_client_of_the_early_port_keeps_no_probe_and_no_worker_waiting(progress, monkeypatch):
    """It sends a byte of its request now and then, longer than a client has in all."""
    monkeypatch.setattr(startup, "_CLIENT_S", 0.5)
    listener = startup.open_listener("127.0.0.1", addresses.PortRange(0, 0))
    port = listener.getsockname()[1]
    early = startup.StartPort(listener, progress)
    is_cut_off, is_over = threading.Event(), threading.Event()

    def send_slowly():
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(50):
                try:
                    client.sendall(b"G")
                except OSError:
                    is_cut_off.set()
                time.sleep(0.1)
        is_over.set()

    sending = threading.Thread(target=send_slowly)
    sending.start()
    time.sleep(0.1)
    status, _ = get(port, "/live")
    early.release()
    has_waited = is_over.is_set()
    sending.join()
    listener.close()

    assert (status, has_waited) == (200, False)
    assert is_cut_off.is_set()


class BlockingHost:
    """A host whose engine blocks the event loop while it loads, and asks meanwhile as a kubelet does."""

    def __init__(self, port):
        self.port, self.answers = port, []
        self.system_port = health.SystemPort(
            endpoints=("generate",), is_ready=lambda: True, uptime_s=lambda: 1.0, render=lambda: b""
        )

    async def start(self, after_load):
        self.answers.append(get(self.port, "/live"))
        await after_load()

    async def run_until(self, stop):
        self.answers.append(await asyncio.to_thread(get, self.port, "/health"))

    async def stop(self, timeout_s, grace_s):
        await self.system_port.close()


async def test_worker_is_alive_while_its_engine_blocks_the_event_loop(progress):
    worker = settings.WorkerConfig(
        discovery_backend="mem", request_plane="memory", event_plane="memory"
    )
    listener = startup.open_listener("127.0.0.1", addresses.PortRange(0, 0))
    host = BlockingHost(listener.getsockname()[1])
    await main._serve(worker, lambda runtime: host, progress, startup.StartPort(listener, progress))

    assert [status for status, _ in host.answers] == [200, 200]
    assert "startup" in host.answers[0][1]
    assert host.answers[1][1]["status"] == "ready"


@pytest.mark.parametrize(("last", "is_served"), [(0, False), (9, True)])
def test_system_port_is_the_first_free_one_of_its_range(last, is_served):
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        port = occupant.getsockname()[1]
        ports = addresses.PortRange(port, port + last)
        if is_served:
            with startup.open_listener("127.0.0.1", ports) as listener:
                assert port < listener.getsockname()[1] <= port + last
        else:
            with pytest.raises(errors.ConfigError, match=f"port {port} is in use.*--system-port"):
                startup.open_listener("127.0.0.1", ports)


class PlayedPod:
    """A worker process with the stand-in for an engine, whose system port is asked all the time as a kubelet does."""

    def __init__(self, hub, home, port):
        flags = ("--system-port", str(port), "--discovery-backend=mem", "--request-plane=memory")
        environ = {**os.environ, **hub.environ(home), "DYN_STARTUP_STALL_TIMEOUT": "2"}
        self.port, self.answers, self.is_over = port, [], False
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dynamo.mocker",
                "--model",
                "org/slow",
                *flags,
                "--event-plane=memory",
            ],
            env=environ,
        )
        self._thread = threading.Thread(target=self._probe)
        self._thread.start()

    def _probe(self):
        while not self.is_over:
            live, (health_status, body) = get(self.port, "/live")[0], get(self.port, "/health")
            if live is not None and health_status is not None:
                self.answers.append((live, health_status, body.get("startup")))
            threading.Event().wait(0.05)  # the period of the probe

    def is_healthy(self):
        assert self._process.poll() is None
        return bool(self.answers) and self.answers[-1][1] == 200

    def downloading(self):
        """Return what /live said during the download, and the share that was done."""
        reports = [(live, report) for live, _, report in self.answers if report]
        return [
            (live, report["doneBytes"] / report["totalBytes"])
            for live, report in reports
            if report["stage"] == "download"
        ]

    def is_amid_download(self):
        """Return whether it has shown a share that is neither the beginning nor the end."""
        assert self._process.poll() is None
        return any(0.1 < share < 0.9 for _, share in self.downloading())

    def end(self, *, is_killed=False):
        self.is_over = True
        self._thread.join()
        self._process.kill() if is_killed else self._process.terminate()
        self._process.wait(PATIENT_S)


def test_slow_download_is_alive_shown_and_made_once_for_all_replicas(
    slow_hub, tmp_path, unused_tcp_port_factory
):
    """Twice as much download as a start may stand still: as 10 minutes are beside 5."""
    home = tmp_path / "volume"
    slow_hub.gate.set()
    quick_s, slow_hub.piece_s = slow_hub.piece_s, 0.5  # a busy pod answers few probes meanwhile
    replicas = [PlayedPod(slow_hub, home, unused_tcp_port_factory()) for _ in range(2)]
    try:
        eventually(
            lambda: all(replica.is_amid_download() for replica in replicas), what="the download"
        )
        slow_hub.piece_s = quick_s
        eventually(lambda: all(replica.is_healthy() for replica in replicas), what="ready")
    finally:
        for replica in replicas:
            replica.end()
    restarted = PlayedPod(slow_hub, home, unused_tcp_port_factory())
    try:
        eventually(restarted.is_healthy, what="ready again")
    finally:
        restarted.end()

    for replica in replicas:
        shares = [share for _, share in replica.downloading()]
        assert {live for live, _ in replica.downloading()[1:]} == {200}
        assert shares == sorted(shares)
    assert slow_hub.num_gets == dict.fromkeys(slow_hub.num_gets, 1)
    assert restarted.downloading() == []


def test_download_that_stands_still_is_given_up_and_its_successor_ends_it(
    slow_hub, tmp_path, unused_tcp_port_factory
):
    home = tmp_path / "volume"

    def is_begun():
        """On a busy machine a pod may be given up before its first byte."""
        first = PlayedPod(slow_hub, home, unused_tcp_port_factory())
        try:
            eventually(lambda: 503 in [live for live, _, _ in first.answers], what="given up")
        finally:
            first.end(is_killed=True)  # as a kubelet does with what is not alive
        assert first.answers[0][0] == 200
        return any(path.stat().st_size for path in home.rglob("*.part*"))

    eventually(is_begun, what="a part of the file")
    slow_hub.gate.set()
    second = PlayedPod(slow_hub, home, unused_tcp_port_factory())
    try:
        eventually(second.is_healthy, what="ready")
    finally:
        second.end()

    begins = slow_hub.starts["large.txt"]
    assert begins[0] == 0 < begins[-1]  # the second one goes on where the first one ended
    assert second.downloading()[0][1] > 0.3
