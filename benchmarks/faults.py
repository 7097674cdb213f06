"""What clients see while parts die: `PYTHONPATH=tests:tests/system python -m benchmarks.faults`, with etcd installed.

A frontend and two simulated workers under etcd discovery, 20 requests a second; each fault is done once, and undone.
Prints a row for each: requests and failures, the slowest answer, and how long it took to be noticed and to be well.
"""

import asyncio
import collections
import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import deployment as systems
import httpx

import etcd_server
import tcp_proxy

RATE = 20.0
AWAY_S = 15.0  # longer than a lease
CALM_S = 3.0
LIMIT_S = 60.0
SPEED = ("--speedup-ratio", "20")


class Load:
    """Requests at a steady rate, and how they ended."""

    def __init__(self, frontend: systems.Frontend) -> None:
        self._frontend = frontend
        self._answers: list[tuple[str, float]] = []
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with futures.ThreadPoolExecutor(64) as pool:
            source = threading.Thread(target=self._issue, args=(pool,))
            source.start()
            try:
                yield
            finally:
                self._over.set()
                source.join()

    def __str__(self) -> str:
        failures = collections.Counter(what for what, _ in self._answers if what != "200")
        slowest_s = max(took for _, took in self._answers)
        told = ", ".join(f"{count} × {what}" for what, count in failures.items()) or "none"
        return f"{len(self._answers)} requests, failed: {told}, slowest {slowest_s:.2f} s"

    def _issue(self, pool: futures.Executor) -> None:
        while not self._over.wait(1 / RATE):
            pool.submit(self._ask)

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            what = str(self._frontend.chat(max_tokens=16).status_code)
        except httpx.HTTPError as error:
            what = type(error).__name__
        self._answers.append((what, time.monotonic() - began))


class Scene:
    """The deployment, and what can be measured of it from outside."""

    def __init__(self, directory: Path) -> None:
        self.etcd = etcd_server.EtcdServer(directory / "etcd")
        self.etcd.start()
        self.deployment = systems.Deployment(directory)
        self.deployment.environ["DYN_DISCOVERY_BACKEND"] = "etcd"
        self.frontend = self.start(lambda: self.deployment.frontend())
        self.workers = [self.start(lambda: self.deployment.mocker(*SPEED)) for _ in range(2)]
        self.frontend.await_models([systems.MODEL])
        self.await_keys(2)

    def start(self, make: Callable[[], systems.Process], url: str = "") -> systems.Process:
        self.deployment.environ["ETCD_ENDPOINTS"] = url or self.etcd.url
        return make()

    def await_keys(self, count: int) -> float:
        def is_so() -> bool:
            held = self.etcd.held()
            return sum("/backend/generate/" in key and "instances" in key for key in held) == count

        return systems.eventually(is_so, within_s=LIMIT_S, what=f"{count} workers in etcd")

    def await_listed(self, count: int) -> float:
        def is_so() -> bool:
            health = httpx.get(f"{self.frontend.url}/health", timeout=5).json()
            ids = {i["instance_id"] for i in health["instances"] if i["endpoint"] == "generate"}
            return len(ids) == count

        return systems.eventually(is_so, within_s=LIMIT_S, what=f"{count} workers at the frontend")

    def close(self) -> None:
        self.deployment.end()
        self.etcd.stop()


def worker_killed(scene: Scene) -> str:
    scene.workers[0].kill()
    return f"unlisted and out of etcd after {scene.await_listed(1):.2f} s"


def worker_stopped(scene: Scene) -> str:
    scene.workers[0].signal(signal.SIGSTOP)
    noticed_s = scene.await_listed(1)
    time.sleep(AWAY_S - noticed_s)
    scene.workers[0].signal(signal.SIGCONT)
    return (
        f"unlisted after {noticed_s:.2f} s, listed {scene.await_listed(2):.2f} s after it went on"
    )


def worker_partitioned(scene: Scene) -> str:
    with proxied(scene.etcd.port) as (proxy, address, loop):
        scene.start(lambda: scene.deployment.mocker(*SPEED), f"http://{address}")
        scene.await_listed(3)
        loop.call_soon_threadsafe(proxy.drop)
        noticed_s = scene.await_listed(2)
        loop.call_soon_threadsafe(proxy.heal)
        return (
            f"unlisted after {noticed_s:.2f} s, listed {scene.await_listed(3):.2f} s after healing"
        )


def etcd_killed(scene: Scene) -> str:
    return _etcd_away(scene, lose_data=False)


def etcd_emptied(scene: Scene) -> str:
    return _etcd_away(scene, lose_data=True)


def etcd_stopped(scene: Scene) -> str:
    scene.etcd.freeze()
    time.sleep(AWAY_S)
    scene.etcd.thaw()
    return f"all keys in etcd {scene.await_keys(2):.2f} s after it went on"


def _etcd_away(scene: Scene, *, lose_data: bool) -> str:
    scene.etcd.stop()
    time.sleep(AWAY_S)
    if lose_data:
        scene.etcd.lose_data()
    scene.etcd.start()
    back_s = scene.await_keys(2)
    scene.start(lambda: scene.deployment.mocker(*SPEED))
    return f"all keys in etcd after {back_s:.2f} s, a new worker listed {scene.await_listed(3):.2f} s after its start"


@contextlib.contextmanager
def proxied(port: int) -> Iterator[tuple[tcp_proxy.TcpProxy, str, asyncio.AbstractEventLoop]]:
    """A road to this port of ours that can be cut, its address, and the loop in which it lives."""
    proxy, loop = tcp_proxy.TcpProxy(port), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    address = asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
    try:
        yield proxy, address, loop
    finally:
        asyncio.run_coroutine_threadsafe(proxy.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


FAULTS = (
    worker_killed,
    worker_stopped,
    worker_partitioned,
    etcd_killed,
    etcd_emptied,
    etcd_stopped,
)


def main() -> None:
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as directory:
            scene = Scene(Path(directory))
            load = Load(scene.frontend)
            try:
                with load.running():
                    time.sleep(CALM_S)
                    outcome = fault(scene)
                    time.sleep(CALM_S)
                print(f"{fault.__name__}: {load}; {outcome}", flush=True)
            finally:
                scene.close()


if __name__ == "__main__":
    main()
