"""How NATS's faults look to clients: `PYTHONPATH=tests:tests/system python -m benchmarks.nats_faults`.

A frontend and two simulated workers over file discovery, NATS requests and NATS events, a real server. Eight streams
run when the fault comes. A row for each fault: how they ended and when, and how soon new requests are answered.
"""

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

NUM_STREAMS = 8
AWAY_S = 6.0
LIMIT_S = 60.0


class Scene:
    """The deployment and its streams."""

    def __init__(self, directory: Path) -> None:
        self.nats = nats_server.NatsServer(directory / "nats")
        self.nats.start()
        self.deployment = systems.Deployment(directory)
        self.deployment.environ |= {
            "DYN_REQUEST_PLANE": "nats",
            "DYN_EVENT_PLANE": "nats",
            "NATS_SERVER": self.nats.url,
        }
        self.frontend = self.deployment.frontend()
        self.workers = [self.deployment.mocker("--speedup-ratio", "1") for _ in range(2)]
        self.frontend.await_models([systems.MODEL])
        systems.eventually(self._are_both_listed, within_s=LIMIT_S, what="two workers")
        self.ended: queue.Queue[tuple[str, float]] = queue.Queue()

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
        with self.frontend.stream(max_tokens=700, ignore_eos=True) as lines:
            next(lines)
            begun.wait()
            rest = list(lines)
        is_whole = rest[-1] == "[DONE]" and "error" not in json.loads(rest[-2])
        self.ended.put(("whole" if is_whole else "error", time.monotonic()))


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


def play(scene: Scene, fault: Callable[[Scene], Callable[[], None]]) -> str:
    threads = scene.begin_streams()
    harmed_at = time.monotonic()
    undo = fault(scene)
    time.sleep(AWAY_S)
    undo()
    well_s = scene.await_answer()
    for thread in threads:
        thread.join()
    ends = [scene.ended.get() for _ in threads]
    broken = [at - harmed_at for what, at in ends if what == "error"]
    told = f", after {statistics.median(broken):.2f} s (last {max(broken):.2f})" if broken else ""
    broke = f"{len(broken)} of {len(ends)} streams ended by an error{told}"
    return f"{broke}; an answer {well_s:.2f} s after the fault was over"


def main() -> None:
    for fault in (server_killed, server_stopped, worker_killed, worker_stopped):
        with tempfile.TemporaryDirectory() as directory:
            scene = Scene(Path(directory))
            try:
                print(f"{fault.__name__}: {play(scene, fault)}", flush=True)
            finally:
                scene.close()


if __name__ == "__main__":
    main()
