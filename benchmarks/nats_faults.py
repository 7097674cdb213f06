"""How NATS's faults look to clients: `PYTHONPATH=tests:tests/system python -m benchmarks.nats_faults`.

A frontend and two simulated workers over file discovery, NATS requests and NATS events, a real server. Eight streams
of 10 s run when the fault comes. A row for each fault: how they ended, how long they paused, how soon new requests are
answered.
"""

import contextlib
import itertools
import json
import queue
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import deployment as systems
import httpx

import nats_server
from benchmarks import faults

NUM_STREAMS = 8
SPEED = ("--tick-ms", "20")
LIMIT_S = 120.0


class Scene:
    """The deployment and its streams."""

    def __init__(self, directory: Path, road: contextlib.ExitStack) -> None:
        """The first worker reaches NATS on a road that can be cut."""
        self.nats = nats_server.NatsServer(directory / "nats")
        self.nats.start()
        port = int(self.nats.url.rpartition(":")[2])
        self.proxy, address, self._loop = road.enter_context(faults.proxied(port))
        self.deployment = systems.Deployment(directory)
        self.deployment.environ |= {
            "DYN_REQUEST_PLANE": "nats",
            "DYN_EVENT_PLANE": "nats",
            "NATS_SERVER": f"nats://{address}",
        }
        self.workers = [self.deployment.mocker(*SPEED)]
        self.deployment.environ["NATS_SERVER"] = self.nats.url
        self.workers.append(self.deployment.mocker(*SPEED))
        self.frontend = self.deployment.frontend()
        self.frontend.await_models([systems.MODEL])
        systems.eventually(self._are_both_listed, within_s=LIMIT_S, what="two workers")
        self.ended: queue.Queue[tuple[str, float]] = queue.Queue()  # and its longest pause

    def on_road(self, do: Callable[[], None]) -> None:
        """Something to the first worker's road."""
        self._loop.call_soon_threadsafe(do)

    def begin_streams(self) -> list[threading.Thread]:
        """Each has brought its first token when this returns."""
        begun = threading.Barrier(NUM_STREAMS + 1)
        threads = [threading.Thread(target=self._stream, args=(begun,)) for _ in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        begun.wait()
        return threads

    def await_answer(self) -> float:
        def is_answered() -> bool:
            return self.frontend.chat(max_tokens=2).status_code == 200

        return systems.eventually(is_answered, within_s=LIMIT_S, what="an answer")

    def close(self) -> None:
        self.deployment.end()
        self.nats.stop()

    def _are_both_listed(self) -> bool:
        health = httpx.get(f"{self.frontend.url}/health", timeout=5).json()
        return len({one["instance_id"] for one in health["instances"]}) == len(self.workers)

    def _stream(self, begun: threading.Barrier) -> None:
        rest = []
        with self.frontend.stream(max_tokens=500, ignore_eos=True) as lines:
            next(lines)
            begun.wait()
            times = [time.monotonic()]  # the fault may come before the next piece
            for line in lines:
                rest.append(line)
                times.append(time.monotonic())
        is_whole = rest[-1] == "[DONE]" and "error" not in json.loads(rest[-2])
        pause_s = max(b - a for a, b in itertools.pairwise(times))
        self.ended.put(("whole" if is_whole else "error", pause_s))


def server_killed(scene: Scene) -> Callable[[], None]:
    scene.nats.stop()
    return scene.nats.start


def server_stopped(scene: Scene) -> Callable[[], None]:
    scene.nats.freeze()
    return scene.nats.thaw


def worker_killed(scene: Scene) -> Callable[[], None]:
    scene.workers[0].kill()
    return lambda: None


def worker_stopped(scene: Scene) -> Callable[[], None]:
    scene.workers[0].signal(signal.SIGSTOP)
    return lambda: scene.workers[0].signal(signal.SIGCONT)


def worker_partitioned(scene: Scene) -> Callable[[], None]:
    scene.on_road(scene.proxy.drop)
    return lambda: scene.on_road(scene.proxy.heal)


FAULTS = (
    (server_killed, 2.0),
    (server_killed, 10.0),
    (server_killed, 60.0),
    (server_stopped, 6.0),
    (worker_killed, 6.0),
    (worker_stopped, 6.0),
    (worker_partitioned, 6.0),
)


def play(scene: Scene, fault: Callable[[Scene], Callable[[], None]], away_s: float) -> str:
    threads = scene.begin_streams()
    undo = fault(scene)
    time.sleep(away_s)
    undo()
    well_s = scene.await_answer()
    for thread in threads:
        thread.join()
    ends = [scene.ended.get() for _ in threads]
    pauses_s = [pause_s for _, pause_s in ends]
    num_whole = sum(what == "whole" for what, _ in ends)
    spread = f"{statistics.median(pauses_s):.2f} s (longest {max(pauses_s):.2f})"
    whole = f"{num_whole} of {len(ends)} streams whole, paused for {spread}"
    return f"{whole}; an answer {well_s:.2f} s after the fault was over"


def main() -> None:
    for fault, away_s in FAULTS:
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as road:
            scene = Scene(Path(directory), road)
            try:
                print(f"{fault.__name__}, {away_s:g} s: {play(scene, fault, away_s)}", flush=True)
            finally:
                scene.close()


if __name__ == "__main__":
    main()
