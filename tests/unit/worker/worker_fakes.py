"""An engine that does what the test says, and a call that remembers what it was told."""

import contextlib

import httpx
import msgspec

from dynamo.engine import api
from dynamo.protocols import blocks, generate, load
from dynamo.worker import health
from waiting import PATIENT_S

FACTS = api.EngineFacts(
    context_length=128,
    kv_block_size=16,
    total_kv_blocks=64,
    max_num_seqs=4,
    max_num_batched_tokens=256,
)


def make_load(active_blocks: int = 0) -> load.ForwardPassMetrics:
    return load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=0, request_total_slots=4, num_requests_waiting=0
        ),
        kv_stats=load.KvStats(kv_active_blocks=active_blocks, kv_total_blocks=64),
    )


def make_request(request_id: str = "r", n: int = 1) -> generate.Request:
    return generate.Request(
        id=request_id,
        model="m",
        token_ids=blocks.pack([1, 2, 3]),
        sampling_options=generate.SamplingOptions(n=n),
    )


class FakeEngine:
    """Takes what it is given; refuses with `refusal`, if there is one."""

    def __init__(self) -> None:
        self.sink: api.EngineSink | None = None
        self.submitted: list[generate.Request] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.num_cleared = 0
        self.num_stopped = 0
        self.capabilities = api.EngineCapabilities()

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        self.sink = sink
        return FACTS

    def submit(self, request: generate.Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        self.aborted.append((request_id, index))

    def load(self) -> list[load.ForwardPassMetrics]:
        return [make_load(len(self.submitted) - len(self.aborted))]

    async def clear_kv_blocks(self) -> None:
        self.num_cleared += 1

    async def stop(self) -> None:
        self.num_stopped += 1


class FakeCall:
    """One stream, as its handler sees it."""

    def __init__(self, body: object = None) -> None:
        self.endpoint = "generate"
        self.body = msgspec.Raw(body if isinstance(body, bytes) else msgspec.msgpack.encode(body))
        self.headers: dict[str, str] = {}
        self.sent: list[object] = []
        self.error: Exception | None = None
        self.num_finished = 0
        self.cancel = lambda: None
        self.cancel_choice = None

    def on_cancel(self, callback) -> None:
        self.cancel = callback

    def on_signal(self, callback) -> None:
        self.cancel_choice = callback

    def send(self, output: generate.Output) -> None:
        self.sent.append(output)

    def reply(self, value: object) -> None:
        self.sent.append(value)

    def finish(self) -> None:
        self.num_finished += 1

    def fail(self, error: Exception) -> None:
        assert self.error is None
        self.error = error


class Commands:
    """Records the commands of an operator and answers `result`; raises `failure` if it is set."""

    result: object = None

    def __init__(self):
        self.calls, self.failure = [], None

    def record(self, *call):
        if self.failure is not None:
            raise self.failure
        self.calls.append(call)
        return self.result


@contextlib.asynccontextmanager
async def client_of(routes, path=""):
    """An HTTP client, below this path, of a system port with these command routes."""
    served = health.SystemPort(
        endpoints=("generate",),
        is_ready=lambda: True,
        uptime_s=lambda: 0.0,
        render=lambda: b"",
        command_routes=routes,
    )
    port = await served.start("127.0.0.1", 0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}{path}", timeout=PATIENT_S
    ) as client:
        yield client
    await served.close()
