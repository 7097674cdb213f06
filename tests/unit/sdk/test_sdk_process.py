"""How services ask each other."""

import asyncio
import contextlib
import dataclasses
import socket

import httpx
import msgspec
import pydantic
import pytest

from dynamo.base import config, errors
from dynamo.protocols import generate, instances
from dynamo.runtime import component
from dynamo.runtime.http import browsers
from dynamo.sdk import (
    api,
    async_on_start,
    declaration,
    depends,
    endpoint,
    liveness,
    on_shutdown,
    process,
    readiness,
    service,
)
from waiting import PATIENT_S


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """What a service keeps for all of its process is gone after each test."""
    monkeypatch.setattr(declaration, "dynamo_context", {})
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", "{}")  # so that the former state comes back
    monkeypatch.delenv("DYNAMO_SERVICE_CONFIG")


@service(dynamo={"namespace": "demo"})
class Asked:
    """A service that others depend on."""

    @endpoint()
    async def generate(self, request: str):
        yield request


class Endpoint:
    """Its workers: each one's items, and then it is lost if the last one is LOST."""

    LOST = "lost"

    def __init__(self, *workers):
        self._workers = iter(workers)
        self.num_asked = 0

    async def wait_for_instances(self, timeout_s):
        """They are there."""

    async def stream(self, request, *, item_type, instance_id):
        self.num_asked += 1
        for item in next(self._workers):
            if item == self.LOST:
                raise errors.WorkerLost("it has ended")
            yield item


async def ask(workers, instance_id=None):
    runtime = type("Runtime", (), {"client": lambda self, url: workers})()
    call = process._caller(runtime, "demo", Asked)
    return [item async for item in call("generate", "hi", instance_id)]


async def test_worker_that_is_lost_before_its_first_item_is_replaced():
    workers = Endpoint(["lost"], ["one", "two"])

    assert await ask(workers) == ["one", "two"]
    assert workers.num_asked == 2


async def test_next_worker_is_waited_for_no_longer_than_any(monkeypatch):
    monkeypatch.setattr(process, "FIND_S", 0.0)
    workers = Endpoint(["lost"], ["one"])
    with pytest.raises(errors.WorkerLost):
        await ask(workers)

    assert workers.num_asked == 1


@pytest.mark.parametrize(
    ("workers", "instance_id", "num_asked"),
    [
        (Endpoint(["one", "lost"], ["one"]), None, 1),  # some of its answer has been given
        (Endpoint(["lost"], ["one"]), 0, 1),  # no other one will do
    ],
)
async def test_worker_that_cannot_be_replaced_fails_the_request(workers, instance_id, num_asked):
    with pytest.raises(errors.WorkerLost):
        await ask(workers, instance_id)

    assert workers.num_asked == num_asked


@contextlib.asynccontextmanager
async def serving(method, *origins):
    """The address of a service's HTTP API with this method, which is `POST /tell` and pages of `origins` may call."""
    health = process.Health(0)
    health.has_started = True
    policy = browsers.BrowserPolicy(frozenset(origins), frozenset(("box",)))
    server = process._make_server({"tell": process._api(method)}, health, policy)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}/tell"
    finally:
        await server.close()


async def test_answer_ends_when_its_client_has_gone():
    has_ended = asyncio.Event()

    async def tell():
        try:
            while True:
                yield "and on "
                await asyncio.sleep(0.01)
        finally:
            has_ended.set()

    async with serving(tell) as url, httpx.AsyncClient(timeout=PATIENT_S) as client:
        async with client.stream("POST", url) as answer:
            async for _ in answer.aiter_raw():
                break
        async with asyncio.timeout(PATIENT_S):
            await has_ended.wait()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "hi"}, 500, "internal error"),
        ({"question": "hi"}, 400, "the method's arguments: missing a required argument: 'prompt'"),
        ([], 400, "the method's arguments: Expected `object`, got `array`"),
    ],
)
async def test_mistake_of_a_method_is_not_that_of_its_client(body, status, said):
    async def tell(prompt):
        yield prompt + 1

    async with serving(tell) as url, httpx.AsyncClient(timeout=PATIENT_S) as client:
        answer = await client.post(url, json=body)

    assert answer.status_code == status
    assert said in answer.text


async def test_plain_method_answers_with_its_value():
    async with (
        serving(lambda prompt: {"said": prompt}) as url,
        httpx.AsyncClient(timeout=PATIENT_S) as client,
    ):
        answer = await client.post(url, json={"prompt": "hi"})

    assert answer.json() == {"said": "hi"}


async def test_endpoint_is_asked_by_its_name_or_its_method():
    @service
    class Named:
        @endpoint(name="public")
        async def method(self, request: str):
            yield request

    async def call(name, request, instance_id):
        yield name

    client = declaration.ServiceClient(declaration.spec_of(Named), call)

    assert [item async for item in client.public("hi")] == ["public"]
    assert [item async for item in client.method("hi")] == ["public"]
    with pytest.raises(
        AttributeError, match="Named has no endpoint 'other'; there are method, pub"
    ):
        _ = client.other


@service
class Wrong:
    def __init__(self, size: int):
        self.size = size + "one"


def test_mistake_in_a_constructor_keeps_its_line_and_a_missing_value_is_named():
    spec = declaration.spec_of(Wrong)
    with pytest.raises(
        errors.ConfigError, match="class Wrong: missing a required argument: 'size'"
    ):
        process._construct(spec, {}, {})
    with pytest.raises(TypeError, match="unsupported operand"):
        process._construct(spec, {"size": 1}, {})


@service
class Early:
    asked = depends(Asked)

    def __init__(self):
        self.ask = self.asked.generate


def test_constructor_may_take_the_client_of_another_service():
    client = declaration.ServiceClient(declaration.spec_of(Asked), lambda *words: words)

    early = process._construct(declaration.spec_of(Early), {}, {"asked": client})

    assert early.ask("hi") == ("generate", "hi", None)


@dataclasses.dataclass
class Words:
    text: str


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"words": {"text": "hi"}}, 200, "hi 1"),
        ({"words": {"text": "hi"}, "number": None}, 200, "hi None"),
        ({"words": {"txt": "hi"}}, 400, "words: Object missing required field `text`"),
        ({"words": {"text": "hi"}, "number": "x"}, 400, "number: Expected `int | null`, got `str`"),
    ],
)
async def test_fields_of_a_body_get_the_types_of_the_parameters(body, status, said):
    async def tell(words: Words, number: int | None = 1):
        yield f"{words.text} {number}"

    async with serving(tell) as url, httpx.AsyncClient(timeout=PATIENT_S) as client:
        answer = await client.post(url, json=body)

    assert answer.status_code == status
    assert said in answer.text


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ((), {}, (30.0, 0.0)),
        (("--graceful-shutdown-timeout", "90"), {}, (90.0, 0.0)),
        ((), {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "80"}, (80.0, 0.0)),
        (("--graceful-shutdown-grace-period", "0.01"), {}, (30.0, 0.01)),
    ],
)
async def test_requests_of_a_service_may_take_as_long_as_its_setting_says(
    monkeypatch, argv, environ, expected
):
    @service()
    class Idle:
        pass

    drains = []

    async def note_drain(self, *seconds):
        drains.append(seconds)

    stop = asyncio.Event()
    stop.set()
    monkeypatch.setattr(process.process_setup, "stop_on_signals", lambda: stop)
    monkeypatch.setattr(component.DistributedRuntime, "drain", note_drain)
    words = ["m:Idle", "--discovery-backend", "mem", *argv]
    options = config.load(process.ServiceProcessConfig, prog="x", argv=words, environ=environ)
    await process.run(options, [declaration.spec_of(Idle)])

    assert drains == [expected]


async def test_service_reads_the_tokens_of_a_worker(monkeypatch):
    stop, worker = asyncio.Event(), instances.EndpointName("dynamo", "asker", "generate")
    answers = []

    def answer(call):
        call.send(generate.Output((7,), generate.FinishReason.STOP))
        call.finish()

    @service()
    class Asker:
        @async_on_start
        async def ask(self):
            runtime = declaration.dynamo_context["runtime"]
            await runtime.register(worker, answer)
            client = runtime.client(worker)
            await client.wait_for_instances(PATIENT_S)
            answers.extend([i async for i in client.stream("hi", item_type=generate.Output)])
            call = process._caller(runtime, "dynamo", Asker)
            answers.extend([item async for item in call("generate", "hi", None)])
            stop.set()

    monkeypatch.setattr(process.process_setup, "stop_on_signals", lambda: stop)
    options = process.ServiceProcessConfig(
        target="m:Asker", discovery_backend="mem", request_plane="memory", event_plane="memory"
    )
    await process.run(options, [declaration.spec_of(Asker)])

    output, item = answers
    assert output == generate.Output((7,), generate.FinishReason.STOP)
    assert (list(item[0]), item[1]) == ([7], "stop")


async def test_context_has_the_endpoints_of_the_service_themselves(monkeypatch):
    stop, seen = asyncio.Event(), []
    stop.set()

    @service()
    class Server:
        @async_on_start
        def look(self):
            runtime = declaration.dynamo_context["runtime"]
            (served,) = declaration.dynamo_context["endpoints"]
            seen.append((served.lease_id() == runtime.instance_id, served.name.path))

        @endpoint()
        async def generate(self, request: str):
            yield request

    monkeypatch.setattr(process.process_setup, "stop_on_signals", lambda: stop)
    options = process.ServiceProcessConfig(
        target="m:Server", discovery_backend="mem", request_plane="memory", event_plane="memory"
    )
    await process.run(options, [declaration.spec_of(Server)])

    assert seen == [(True, "dynamo/server/generate")]


async def test_methods_of_a_start_are_called_in_the_order_of_the_class(monkeypatch):
    stop, called = asyncio.Event(), []
    stop.set()

    class Base:
        @async_on_start
        def zero(self):
            called.append("zero")

    @service()
    class Starter(Base):
        @async_on_start
        async def open(self):
            called.append("open")

        @async_on_start
        def ask(self):
            called.append("ask")

    monkeypatch.setattr(process.process_setup, "stop_on_signals", lambda: stop)
    options = process.ServiceProcessConfig(
        target="m:Starter", discovery_backend="mem", request_plane="memory", event_plane="memory"
    )
    await process.run(options, [declaration.spec_of(Starter)])

    assert called == ["zero", "open", "ask"]


async def test_shutdown_method_that_fails_does_not_keep_the_next_from_being_called(monkeypatch):
    stop, called = asyncio.Event(), []
    stop.set()

    @service()
    class Leaver:
        @on_shutdown
        def leave(self):
            called.append("leave")
            raise RuntimeError("the register is away")

        @on_shutdown
        async def save(self):
            called.append("save")

    monkeypatch.setattr(process.process_setup, "stop_on_signals", lambda: stop)
    options = process.ServiceProcessConfig(
        target="m:Leaver", discovery_backend="mem", request_plane="memory", event_plane="memory"
    )
    with pytest.raises(RuntimeError, match="register is away"):
        await process.run(options, [declaration.spec_of(Leaver)])

    assert called == ["leave", "save"]


@pytest.mark.parametrize(
    ("text", "expected"), [("7000-7009", [7000, 7001]), ("7001", [7001]), ("-1", [])]
)
async def test_system_port_is_written_as_that_of_workers(monkeypatch, text, expected):
    @service()
    class Idle:
        """Has no endpoint."""

    tried, stop = [], asyncio.Event()
    stop.set()

    async def start(self, host, port, **_):
        tried.append(port)
        if port == 7000:
            raise errors.ConfigError("in use")

    monkeypatch.setattr(process.server.HttpServer, "start", start)
    monkeypatch.setattr(process.process_setup, "stop_on_signals", lambda: stop)
    options = config.load(
        process.ServiceProcessConfig,
        prog="x",
        argv=["m:Idle", "--discovery-backend", "mem"],
        environ={"DYN_SYSTEM_PORT": text},
    )
    await process.run(options, [declaration.spec_of(Idle)])

    assert tried == expected


REBOUND = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
FOREIGN = {"origin": "https://evil.example"}


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 200, "seen"),
        ({"host": "frontend.dynamo.svc:8000"}, 200, "seen"),  # no browser
        ({"host": "box:8000", "origin": "http://box:8000"}, 200, "seen"),
        ({"origin": "https://ours.example"}, 200, "seen"),
        (REBOUND, 403, "expected a Host that names this server, got 'evil.example:8000'"),
        (FOREIGN, 403, "allow it with --cors-allow-origin"),
    ],
)
async def test_service_is_called_by_no_foreign_page(headers, status, said):
    async def tell():
        return "seen"

    async with (
        serving(tell, "https://ours.example") as url,
        httpx.AsyncClient(timeout=PATIENT_S) as client,
    ):
        answer = await client.post(url, json={}, headers=headers)

    assert (answer.status_code, said in answer.text) == (status, True)


async def test_page_of_an_allowed_origin_asks_first_and_reads_the_answer():
    async def tell():
        return "seen"

    origin = "https://ours.example"
    asked = {"origin": origin, "access-control-request-method": "POST"}
    async with serving(tell, origin) as url, httpx.AsyncClient(timeout=PATIENT_S) as client:
        permission = await client.options(url, headers=asked)
        answer = await client.post(url, json={}, headers={"origin": origin})

    assert permission.status_code == 204
    assert answer.headers["access-control-allow-origin"] == origin


async def test_origin_that_is_none_is_refused_before_the_service_starts():
    options = process.ServiceProcessConfig(target="m:Asked", cors_allow_origin=("ours.example",))
    with pytest.raises(errors.ConfigError, match="--cors-allow-origin: expected an origin"):
        await process.run(options, [declaration.spec_of(Asked)])


async def test_port_of_any_service_is_named_where_it_is_none(monkeypatch):
    @service()
    class Told:
        @api
        async def tell(self):
            return "seen"

    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", '{"Told": {"port": "x"}}')
    options = process.ServiceProcessConfig(target="m:Told", discovery_backend="mem")
    with pytest.raises(errors.ConfigError, match=r"Told\.port: expected 1 to 65535, got 'x'"):
        await process.run(options, [declaration.spec_of(Told)])


class Question(pydantic.BaseModel):
    text: str


@pytest.mark.parametrize(
    ("request_", "kind", "expected"),
    [
        ({"text": "hi"}, Question, Question(text="hi")),
        (Question(text="hi").model_dump_json(), Question, Question(text="hi")),  # as 0.3's examples
        ({"text": "hi"}, Question | None, Question(text="hi")),
        ([{"text": "hi"}], list[Question], [Question(text="hi")]),
    ],
)
async def test_model_of_pydantic_is_read_and_sent_wherever_it_stands(request_, kind, expected):
    async def generate(request: kind):
        yield {"seen": request, "was": request == expected}

    items = [item async for item in process._handler(generate)(request_)]
    value = msgspec.to_builtins(expected, enc_hook=lambda model: model.model_dump())

    assert items == [{"seen": value, "was": True}]


@pytest.mark.parametrize("request_", ["hi", '{"txt": 1}', {"txt": 1}, 5])
async def test_request_that_is_no_such_model_is_refused(request_):
    async def generate(request: Question):
        yield request.text

    with pytest.raises(errors.InvalidRequest, match="the request does not fit: 1 validation error"):
        [item async for item in process._handler(generate)(request_)]


async def test_long_answer_waits_for_its_client():
    """It is cut off if more than 8 MiB wait for a client that does not read."""
    piece = "x" * 2**20

    async def tell():
        for _ in range(20):
            yield piece

    async with serving(tell) as url, httpx.AsyncClient(timeout=PATIENT_S) as client:
        answer = await client.post(url, json={})

    assert len(answer.content) == 20 * len(piece)


async def test_port_in_use_is_named_with_the_service_that_has_it(monkeypatch):
    @service()
    class Told:
        @api
        async def tell(self):
            return "seen"

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", f'{{"Told": {{"port": {port}}}}}')
        options = process.ServiceProcessConfig(target="m:Told", discovery_backend="mem")
        with pytest.raises(errors.ConfigError, match=rf"{port} is in use: .* another Told\.port$"):
            await process.run(options, [declaration.spec_of(Told)])


@pytest.mark.parametrize(
    ("live", "ready", "statuses"),
    [
        (True, True, [200, 200, 200, 200]),
        (True, False, [200, 200, 503, 503]),
        (False, True, [503, 503, 200, 200]),
        (RuntimeError("no GPU"), True, [503, 503, 200, 200]),
    ],
)
async def test_probes_are_answered_by_the_methods_of_the_service(live, ready, statuses):
    class Probed:
        @liveness
        def is_alive(self):
            if isinstance(live, Exception):
                raise live
            return live

        @readiness
        async def is_ready(self):
            return ready

    roles = declaration.spec_of(service()(Probed)).methods
    probes = {
        role: [getattr(Probed(), name) for name in roles(role).values()]
        for role in ("liveness", "readiness")
    }
    health = process.Health(0)
    health.has_started = True
    policy = browsers.BrowserPolicy(frozenset(), frozenset())
    server = process._make_server({}, health, policy, probes)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(timeout=PATIENT_S) as client:
        answers = [
            await client.get(f"http://127.0.0.1:{port}{path}")
            for path in ("/live", "/healthz", "/health", "/readyz")
        ]
    await server.close()

    assert [answer.status_code for answer in answers] == statuses
