"""The loader of models with real child processes; what the frontend says of requests is given."""

import asyncio
import contextlib
import dataclasses
import errno
import sys

import msgspec
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.launch import children, guard
from dynamo.planner import model_loader, model_turns, traffic_source
from dynamo.protocols import instances, model_card
from dynamo.runtime.backends import memory
from waiting import until

SLEEP = "import signal; signal.pause()"
PAGE = """# HELP dynamo_frontend_inflight_requests Requests
dynamo_frontend_inflight_requests{{endpoint="chat",model="m0"}} {running}
dynamo_frontend_inflight_requests{{model="poet"}} {poet}
dynamo_frontend_requests_waiting_for_worker{{model="m0"}} {m0}
dynamo_frontend_requests_waiting_for_worker{{model="m1"}} {m1}
"""


class Rig:
    """Two models of 1 GB in 1.5 GB, and a frontend that says what the test says."""

    def __init__(self, codes, guardian):
        self.counts = {"m0": 0, "m1": 0, "running": 0, "poet": 0}
        self.started, self.states = [], {}
        self.registry = memory.MemoryDiscovery(memory.MemoryRegistry())
        models = [
            model_loader.LocalModel(
                name=f"m{number}",
                aliases=(f"org/m{number}",),
                endpoint=instances.EndpointName("dynamo", f"model{number}", "generate"),
                spec=children.ChildSpec(
                    name=f"m{number}", argv=[sys.executable, "-S", "-c", code], environ={}
                ),
                context_length=99,
            )
            for number, code in enumerate(codes)
        ]
        servable = [model_turns.ServableModel(name=one.name, memory_gb=1.0) for one in models]
        self.loader = model_loader.ModelLoader(
            models,
            model_turns.ModelTurns(servable, budget_gb=1.5, idle_s=300),
            self.registry,
            guardian,
            clocks.SystemClock(),
            model_loader.LoaderOptions(
                frontend_url="http://frontend",
                instance_id=10,
                namespace="dynamo",
                stop_timeout_s=5.0,
            ),
            on_start=lambda child: self.started.append(child.spec.name),
            on_change=self.states.update,
        )

    async def register(self, number, **fields):
        """Have the worker of a model serve."""
        name = f"m{number}"
        instance = instances.Instance(
            namespace="dynamo", component=f"model{number}", endpoint="generate",
            instance_id=1, transport={},
        )  # fmt: skip
        card = model_card.ModelCard(
            display_name=name, source_path=name, context_length=99, kv_cache_block_size=16, **fields
        )
        key, record = card.record_for(instance)
        await self.registry.put(key, msgspec.json.encode(record))
        await self.registry.put(instance.key, b"{}")

    until = staticmethod(until)

    async def announced(self):
        """What is announced, by name."""
        entries = (await self.registry.get_prefix(instances.STARTS)).values()
        starts = [msgspec.json.decode(entry, type=instances.WorkerStart) for entry in entries]
        return {start.model: start for start in starts}


@pytest.fixture
async def make(monkeypatch):
    monkeypatch.setattr(model_loader, "POLL_S", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        guardian = stack.enter_context(guard.Guard())

        async def make_rig(*codes):
            made = Rig(codes, guardian)

            async def get(url):
                return PAGE.format(**made.counts).encode()

            monkeypatch.setattr(traffic_source, "get", get)
            await made.loader.announce()
            stack.push_async_callback(made.loader.close)
            running = asyncio.ensure_future(made.loader.run())
            stack.callback(running.cancel)
            return made

        yield make_rig


async def test_all_models_are_announced_under_all_their_names(make):
    rig = await make(SLEEP, SLEEP)
    announced = await rig.announced()

    assert set(announced) == {"m0", "org/m0", "m1", "org/m1"}
    assert all(start.is_on_demand for start in announced.values())
    assert [announced[name].context_length for name in ("m0", "org/m0")] == [99, None]


async def test_two_requests_start_one_worker(make):
    rig = await make(SLEEP, SLEEP)
    rig.counts["m0"] = 2
    await rig.until(lambda: rig.states.get("m0", "").startswith("loading, 2 waiting for about"))
    await rig.register(0)
    rig.counts.update(m0=0, running=2)
    await rig.until(lambda: rig.states["m0"] == "loaded, 2 running")

    assert rig.started == ["m0"]


async def test_requests_for_an_adapter_are_requests_for_its_model(make):
    rig = await make(SLEEP, SLEEP)
    rig.counts["m0"] = 1
    await rig.until(lambda: rig.started == ["m0"])
    await rig.register(0, lora_names=("Poet",))
    rig.counts.update(m0=0, poet=3)

    await rig.until(lambda: rig.states["m0"] == "loaded, 3 running")


async def test_model_leaves_for_another_one_after_its_stay(make, monkeypatch):
    monkeypatch.setattr(model_turns, "MIN_STAY_S", 0.3)
    rig = await make(SLEEP, SLEEP)
    rig.counts["m0"] = 1
    await rig.until(lambda: rig.started == ["m0"])
    await rig.register(0)
    rig.counts.update(m0=0, m1=1, running=1)
    await rig.until(lambda: rig.started == ["m0", "m1"])

    assert rig.states["m0"].startswith("unloaded")


async def test_model_that_cannot_be_loaded_says_why(make):
    rig = await make("import sys; sys.exit('no such weights')", SLEEP)
    rig.counts["m0"] = 1
    await rig.until(lambda: rig.states.get("m0", "").startswith("failed"))

    async def failure():
        return (await rig.announced())["m0"].failure

    assert await until(failure) == "m0 exited with 1; its last words: no such weights"
    assert rig.started == ["m0"]


async def test_loader_goes_on_after_a_frontend_that_did_not_answer(make, monkeypatch):
    rig = await make(SLEEP, SLEEP)
    tries = []

    async def get(url):
        tries.append(url)
        if len(tries) < 3:
            raise errors.Unavailable("no answer")
        return PAGE.format(m0=1, m1="NaN", running=0, poet=0).encode()

    monkeypatch.setattr(traffic_source, "get", get)
    await rig.until(lambda: rig.started == ["m0"])

    assert set(tries) == {"http://frontend/metrics"}


async def test_loader_goes_on_after_a_discovery_that_refused_a_record(make, monkeypatch):
    """Discovery in a directory on a full disk raises ConfigError."""
    rig = await make(SLEEP, SLEEP)
    refused = []

    async def refuse(key, value):
        refused.append(key)
        raise errors.ConfigError("no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.registry, "put", refuse)
        rig.counts["m0"] = 1
        await rig.until(lambda: refused)
    await rig.register(0)
    await rig.until(lambda: rig.states.get("m0", "").startswith("loaded"))


async def test_process_that_cannot_be_started_is_a_failure_of_its_model(make, monkeypatch):
    rig = await make(SLEEP, SLEEP)

    async def start(*_):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(children, "start", start)
    rig.counts["m0"] = 1
    await rig.until(lambda: "Resource temporarily unavailable" in rig.states.get("m0", ""))


class Change:
    """A change that an operator asks for, and its answer."""

    def __init__(self, **fields):
        self.body = msgspec.Raw(msgspec.msgpack.encode(fields))
        self.answer = self.error = None

    def reply(self, value):
        self.answer = value

    def finish(self):
        """Do nothing: the answer is known."""

    def fail(self, error):
        self.error = error


async def test_unloaded_worker_is_not_killed_while_it_may_drain(make, monkeypatch):
    limits_s, stop = [], children.Child.stop

    async def note_limit(child, timeout_s):
        limits_s.append(timeout_s)
        await stop(child, timeout_s)

    rig = await make(SLEEP, SLEEP)
    model = rig.loader._models["m0"]
    flags = ("--graceful-shutdown-timeout", "600", "--graceful-shutdown-timeout=900")
    spec = dataclasses.replace(model.spec, argv=[*model.spec.argv, *flags])
    rig.loader._models["m0"] = dataclasses.replace(model, spec=spec)
    rig.loader.change(Change(model="m0", action="load"))
    await rig.until(lambda: rig.started == ["m0"])
    await rig.register(0)
    await rig.until(lambda: rig.states.get("m0", "").startswith("loaded"))
    monkeypatch.setattr(model_turns, "MIN_STAY_S", 0.0)
    monkeypatch.setattr(children.Child, "stop", note_limit)
    rig.loader.change(Change(model="m0", action="unload"))
    await rig.until(lambda: limits_s)

    assert limits_s[0] > 900


async def test_operator_loads_a_model_without_a_request(make):
    rig = await make(SLEEP, SLEEP)
    change = Change(model="m1", action="load")
    rig.loader.change(change)
    await rig.until(lambda: rig.started == ["m1"])
    await rig.register(1)

    async def is_shown():
        start = (await rig.announced())["m1"]
        return start.phase == "loaded" and start.loader == 10

    await until(is_shown)
    refusals = [Change(model="m1", action=action) for action in ("unload", "pin")]
    for refused in refusals:
        rig.loader.change(refused)

    assert change.answer == {"phase": "unloaded"}
    assert [type(refused.error) for refused in refusals] == [errors.Conflict] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "other", "action": "load"}, "expected one of m0, m1, got 'other'"),
        ({"model": "m0", "action": "burn"}, "expected a change of a model: Invalid enum value"),
        ({}, "expected a change of a model: Object missing required field"),
    ],
)
async def test_change_that_is_none_is_refused(make, fields, said):
    rig = await make(SLEEP, SLEEP)
    change = Change(**fields)
    rig.loader.change(change)

    assert isinstance(change.error, errors.InvalidRequest)
    assert str(change.error).startswith(said)
