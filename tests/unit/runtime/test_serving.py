"""Endpoints that a service of a user serves: their end, their metrics and their health."""

import asyncio
import contextlib
import json

import pytest

from dynamo.base import addresses, config, errors, tasks
from dynamo.runtime import component, decorators, serving, system_port
from dynamo.testing import clock
from waiting import PATIENT_S, until

NAME = "ns.backend.generate"
CHECK = serving.EndpointCheck(wait_s=10, answer_s=3)


class Service:
    """One runtime, and the endpoints that it serves."""

    def __init__(self, runtime, running):
        self.runtime, self._running = runtime, running

    async def serve(self, handler, name=NAME, **options):
        """Serve the handler; return the task and a client."""
        endpoint = self.runtime.endpoint(name)
        serving_task = self._running.start(
            f"serve {name}", endpoint.serve_endpoint(handler, **options)
        )
        client = await endpoint.client()
        await client.wait_for_instances(PATIENT_S)
        return serving_task, client


@pytest.fixture
async def service():
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster) as runtime,
        tasks.Tasks() as running,
    ):
        yield Service(runtime, running)


async def values(stream):
    async with asyncio.timeout(PATIENT_S):
        return [item.data() async for item in stream]


async def begin_and_wait(request):
    yield "begun"
    await asyncio.Event().wait()


async def test_handler_that_waits_for_something_cancelled_fails_its_request(service, caplog):
    async def handler(request):
        yield 1
        waiting = asyncio.get_running_loop().create_future()
        waiting.cancel()
        await waiting

    _, client = await service.serve(handler)

    with pytest.raises(
        errors.DynamoError, match="internal error in ns/backend/generate: Cancelled"
    ):
        await values(await client.generate("hi"))
    assert "the handler of ns/backend/generate failed" in caplog.text


async def test_second_service_of_an_endpoint_is_refused_and_the_first_stays(service):
    async def handler(request):
        yield request

    _, client = await service.serve(handler)
    before = await service.runtime.discovery.get_prefix("v1/")
    with pytest.raises(errors.LocalProtocolError, match="is served already in this process"):
        await service.runtime.endpoint(NAME).serve_endpoint(handler)

    assert await service.runtime.discovery.get_prefix("v1/") == before
    assert await values(await client.generate("hi")) == ["hi"]


async def test_endpoint_that_has_ended_is_served_again(service):
    async def first(request):
        yield "first"

    async def second(request):
        yield "second"

    serving_task, client = await service.serve(first)
    serving_task.cancel()
    await asyncio.wait([serving_task])
    await until(lambda: not client.instance_ids())
    _, client = await service.serve(second)

    assert await values(await client.generate("hi")) == ["second"]


async def cancel_while_it_leaves(serving_task, service, monkeypatch):
    """End a served endpoint, and cancel that once more while discovery does not answer."""
    is_leaving = asyncio.Event()

    async def hang(*keys):
        is_leaving.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as away:
        away.setattr(service.runtime.discovery, "delete", hang)
        serving_task.cancel()
        await is_leaving.wait()
        serving_task.cancel()
        await asyncio.wait([serving_task])


async def test_endpoint_that_could_not_leave_discovery_is_listed_when_it_is_served_again(
    service, monkeypatch
):
    async def handler(request):
        yield request

    serving_task, _ = await service.serve(handler)
    await cancel_while_it_leaves(serving_task, service, monkeypatch)
    before = await service.runtime.discovery.get_prefix("v1/")
    await service.runtime.discovery.delete(*before)
    _, client = await service.serve(handler)

    assert await values(await client.generate("hi")) == ["hi"]


async def test_endpoint_that_could_not_leave_discovery_ends_its_requests(service, monkeypatch):
    has_ended = asyncio.Event()

    async def handler(request):
        try:
            yield "begun"
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    serving_task, client = await service.serve(handler)
    stream = await client.generate("hi")
    assert (await anext(stream)).data() == "begun"
    await cancel_while_it_leaves(serving_task, service, monkeypatch)

    assert has_ended.is_set()
    with pytest.raises(errors.WorkerLost, match="is not served here any more"):
        await values(stream)


async def test_answer_of_an_engine_that_ends_is_not_complete(service, caplog):
    async def handler(request):
        yield "begun"
        raise GeneratorExit("engine was shut down during token generation")

    _, client = await service.serve(handler)
    stream = await client.generate("hi")

    assert (await anext(stream)).data() == "begun"
    with pytest.raises(errors.WorkerLost, match="is ending: ask another"):
        await anext(stream)
    assert "the engine behind ns/backend/generate ended" in caplog.text


async def test_handler_that_waits_for_nothing_lets_others_have_their_turn(service):
    num_turns = 0

    async def take_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def handler(request):
        for _ in range(1000):
            yield num_turns

    _, client = await service.serve(handler)
    others = asyncio.ensure_future(take_turns())
    turns = await values(await client.generate("hi"))
    others.cancel()

    assert len(turns) == 1000
    assert turns[-1] - turns[0] >= 5


async def test_requests_of_an_endpoint_that_is_served_no_longer_are_lost(service):
    serving_task, client = await service.serve(begin_and_wait)
    (instance_id,) = client.instance_ids()
    stream = await client.generate("hi")
    assert (await anext(stream)).data() == "begun"

    serving_task.cancel()

    with pytest.raises(errors.WorkerLost, match="is not served here any more"):
        await values(stream)
    await until(lambda: not client.instance_ids())
    with pytest.raises(errors.NoWorkers):
        await client.direct("hi", instance_id)


@pytest.mark.parametrize("is_graceful", [True, False])
async def test_draining_finishes_requests_only_of_a_graceful_endpoint(service, is_graceful):
    may_end = asyncio.Event()

    async def handler(request):
        yield "begun"
        await may_end.wait()
        yield "ended"

    _, client = await service.serve(handler, graceful_shutdown=is_graceful)
    stream = await client.generate("hi")
    await anext(stream)
    draining = asyncio.ensure_future(service.runtime.drain(PATIENT_S))
    if is_graceful:
        await until(lambda: not client.instance_ids())
        may_end.set()

        assert await values(stream) == ["ended"]
    else:
        with pytest.raises(errors.WorkerLost, match="is stopping: ask another"):
            await values(stream)
    assert await draining


async def test_metrics_have_the_labels_of_their_endpoint(service):
    async def handler(request):
        yield request

    async def refuse(request):
        raise errors.InvalidRequest("no")
        yield

    _, client = await service.serve(handler, metrics_labels=[("model", "m")])
    _, refusing = await service.serve(refuse, "ns.backend.refuse")
    await values(await client.generate("hi"))
    with pytest.raises(errors.InvalidRequest):
        await values(await refusing.generate("hi"))
    text = service.runtime.served.render().decode()

    labels = 'dynamo_component="backend",dynamo_endpoint="generate",dynamo_namespace="ns"'
    assert f'dynamo_component_requests_total{{{labels},model="m"}} 1.0' in text
    assert f'dynamo_component_request_bytes_total{{{labels},model="m"}} 3.0' in text
    assert f'dynamo_component_inflight_requests{{{labels},model="m"}} 0.0' in text
    assert f'dynamo_component_request_duration_seconds_count{{{labels},model="m"}} 1.0' in text
    assert (
        'dynamo_endpoint="refuse",dynamo_namespace="ns",error_type="invalid_request",model=""'
        in text
    )
    assert text.count("# TYPE dynamo_component_requests_total counter") == 1


async def test_metrics_of_the_service_stand_behind_those_of_its_endpoints(service, caplog):
    def fail():
        raise OSError("no such counter")

    for render in (fail, lambda: "# TYPE mine counter\nmine_total 3"):
        service.runtime.endpoint(NAME).metrics.register_prometheus_expfmt_callback(render)
    text = service.runtime.served.render().decode()

    assert text.startswith("# HELP dynamo_component_uptime_seconds")
    assert text.endswith("\n# TYPE mine counter\nmine_total 3\n")
    assert "metrics of the service are left out" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"metrics_labels": [("dynamo_component", "x")]}, "label .* not used already"),
        ({"metrics_labels": [("a b", "x")]}, "label"),
        ({"metrics_labels": [("model", 1)]}, "expected a text, got 1"),
        ({"health_check_payload": "hi"}, "expected a request as a dictionary, got 'hi'"),
    ],
)
async def test_labels_and_payloads_that_cannot_be_used_are_refused(service, options, reason):
    with pytest.raises(errors.ConfigError, match=reason):
        await service.runtime.endpoint(NAME).serve_endpoint(begin_and_wait, **options)


@contextlib.asynccontextmanager
async def checked_runtime(time):
    """A runtime in virtual time whose endpoints are checked, and tasks that end with it."""
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster, time=time) as runtime,
        tasks.Tasks() as running,
    ):
        runtime.served.check = CHECK
        yield runtime, running


async def test_endpoint_that_does_not_answer_its_payload_is_not_ready_until_it_does():
    time, payloads, is_hung = clock.VirtualClock(), [], False

    async def handler(request):
        payloads.append(request)
        if is_hung:
            await asyncio.Event().wait()
        yield "well"
        await asyncio.Event().wait()  # an answer ends behind its first item

    async with checked_runtime(time) as (runtime, running):
        endpoint = runtime.endpoint(NAME)
        listed = asyncio.Event()
        running.start(
            "serve",
            endpoint.serve_endpoint(handler, health_check_payload={"n": 1}, on_listed=listed.set),
        )
        await listed.wait()
        before = runtime.served.states()
        await time.advance(11)
        well = runtime.served.states()
        is_hung = True
        await time.advance(14)
        hung = runtime.served.states()
        is_hung = False
        await time.advance(11)

        assert [before, well, hung] == [{"generate": True}, {"generate": True}, {"generate": False}]
        assert runtime.served.states() == {"generate": True}
        assert payloads == [{"n": 1}] * 3


async def test_endpoint_that_hangs_in_its_end_as_well_is_not_ready(caplog):
    """As one whose engine answers neither a request nor its abort."""
    time, listed = clock.VirtualClock(), asyncio.Event()

    async def handler(request):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()
        yield "never"

    async with checked_runtime(time) as (runtime, running):
        endpoint = runtime.endpoint(NAME)
        serve = endpoint.serve_endpoint(handler, health_check_payload={}, on_listed=listed.set)
        running.start("serve", serve)
        await listed.wait()
        await time.advance(11)
        await time.advance(7)

        assert runtime.served.states() == {"generate": False}
    assert caplog.text.count("neither an item nor an end") == 1


class Port:
    """The system port of a service, and requests to it."""

    def __init__(self, runtime):
        self.is_stopping = False
        self._served = system_port.ServiceSystemPort(
            runtime.served, runtime.engine_routes, awaited=(), is_stopping=lambda: self.is_stopping
        )

    async def __aenter__(self):
        self._port = await self._served.start("127.0.0.1", addresses.ANY_PORT)
        return self

    async def __aexit__(self, *_):
        await self._served.close()

    async def ask(self, path, body=None, headers=()):
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        method, body = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        lines = [f"{method} {path} HTTP/1.0", f"content-length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return int(head.split()[1]), answer


async def test_system_port_shows_health_and_metrics(service):
    async with Port(service.runtime) as port:
        before, _ = await port.ask("/health")
        await service.serve(begin_and_wait)
        status, body = await port.ask("/health")
        _, metrics = await port.ask("/metrics")
        port.is_stopping = True
        stopping, _ = await port.ask("/health")
        live, _ = await port.ask("/live")

    assert (before, status, stopping, live) == (503, 200, 503, 200)
    assert json.loads(body)["endpoints"] == {"generate": "ready"}
    assert b"dynamo_component_requests_total{" in metrics


async def test_system_port_gives_the_commands_that_the_service_registered(service):
    async def start_profile(body):
        if "steps" not in body:
            raise ValueError("steps?")
        return {"status": "ok", **body}

    service.runtime.register_engine_route("start_profile", start_profile)
    service.runtime.register_engine_route("profile/start", start_profile)
    async with Port(service.runtime) as port:
        answer = await port.ask("/engine/start_profile", {"steps": 3})
        nested = await port.ask("/engine/profile/start", {"steps": 3})
        failed, message = await port.ask("/engine/start_profile")
        unknown, _ = await port.ask("/engine/stop_profile")
        malformed, _ = await port.ask("/engine/start_profile", [1])
        of_a_page, _ = await port.ask("/engine/start_profile", {}, ["origin: https://evil.example"])

    assert answer == nested == (200, b'{"status":"ok","steps":3}')
    assert (failed, unknown, malformed, of_a_page) == (500, 404, 400, 403)
    assert b"ValueError: steps?" in message


@pytest.mark.parametrize(
    ("environ", "ports"),
    [
        ({}, None),
        ({"DYN_SYSTEM_PORT": "-1"}, None),
        ({"DYN_SYSTEM_PORT": "8081-8089"}, addresses.PortRange(8081, 8089)),
        ({"DYN_SYSTEM_ENABLED": "true"}, addresses.PortRange(9090, 9090)),
        ({"DYN_SYSTEM_ENABLED": "0", "DYN_SYSTEM_PORT": "8081"}, None),
    ],
)
def test_system_port_of_a_service_is_set_as_a_workers(environ, ports):
    settings = config.load(decorators.UserServiceConfig, prog="dynamo", argv=(), environ=environ)

    assert settings.used_system_port == ports
    assert settings.endpoint_check is None
