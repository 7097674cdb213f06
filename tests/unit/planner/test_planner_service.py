import asyncio
import json
import math
import pathlib
import types

import httpx
import msgspec
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.planner import profile_files
from dynamo.planner.config import ScalingConfig
from dynamo.planner.connectors import WakeUpPromise
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.observation import (
    Fresh,
    Missing,
    Observation,
    PoolLoad,
    PoolState,
    Replicas,
    Traffic,
)
from dynamo.planner.policies import Estimate, Proposal, Targets
from dynamo.planner.scaling_pipeline import Decision
from dynamo.planner.service import Leadership, PlannerService
from dynamo.planner.traffic_source import FrontendLoad
from dynamo.protocols import instances, planner_report
from dynamo.runtime.backends import memory
from dynamo.testing import clock as virtual
from planner_cases import make_profile
from waiting import PATIENT_S, until


class Source:
    """The traffic that a test says."""

    def __init__(self):
        self.reading = Fresh(Traffic(num_requests=5.0))
        self.frontend_load = FrontendLoad(num_open=1)

    async def read(self, interval_s):
        return self.reading


class Load:
    """The load that a test says."""

    def __init__(self):
        self.value = PoolLoad(kv_usage=0.95, num_running=1)

    async def start(self):
        return None

    def read(self):
        return self.value


class Orders:
    """A connector that keeps what was ordered."""

    def __init__(self):
        self.num_prefill, self.num_ready, self.decisions, self.error = 0, 1, [], None

    async def observe(self):
        return PoolState(num_ready=self.num_prefill), PoolState(
            num_ready=self.num_ready, startup_s=1.0
        )

    async def scale(self, decision):
        if self.error:
            raise self.error
        self.decisions.append(decision.replicas)
        self.num_ready = decision.replicas.decode

    async def close(self):
        return None


@pytest.fixture
async def parts():
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())
    made = []

    async def make(**settings):
        source, load, orders = Source(), Load(), Orders()
        service = PlannerService(
            ScalingConfig(adjustment_interval=0.05, scale_down_delay=0, **settings),
            source,
            orders,
            Leadership(registry, "n", len(made) + 1, clocks.SystemClock()),
            clocks.SystemClock(),
            loads=(Load(), load),
        )
        load.service = service
        made.append(service)
        url = f"http://127.0.0.1:{await service.start('127.0.0.1', 0)}"
        return source, load, orders, url

    yield make
    for service in made:
        await service.close()


async def decisions_of(url):
    async with httpx.AsyncClient(timeout=PATIENT_S) as client:
        return (await client.get(f"{url}/planner/decisions")).json()["decisions"]


async def test_full_caches_order_workers_and_every_decision_is_told(parts):
    _, _, orders, url = await parts(max_gpu_budget=3)

    async def has_grown():
        return orders.num_ready == 3

    await until(has_grown)
    rows = await decisions_of(url)
    assert rows[-1]["outcome"] == "up"
    assert rows[-1]["replicas"] == {"prefill": 0, "decode": 2}
    assert "KV cache 95% in use" in rows[-1]["reason"]


async def test_metrics_show_the_desired_workers_and_count_events(parts):
    _, _, orders, url = await parts(max_gpu_budget=2)

    async def has_grown():
        return orders.num_ready == 2

    await until(has_grown)
    async with httpx.AsyncClient(timeout=PATIENT_S) as client:
        page = (await client.get(f"{url}/metrics")).text
    assert 'dynamo_planner_desired_replicas{model_name="",pool="decode"} 2.0' in page
    assert (
        'dynamo_planner_scaling_events_total{direction="up",model_name="",pool="decode"} 1.0'
        in page
    )


async def test_request_that_no_decode_worker_can_take_orders_one_beside_prefill_workers(parts):
    _, load, orders, _ = await parts(mode="disagg", min_endpoint=0)
    load.value = PoolLoad()
    orders.num_prefill, orders.num_ready = 1, 0

    async def has_started():
        return orders.num_ready == 1

    await until(has_started)


async def test_requests_in_the_queue_of_a_router_order_workers(parts):
    source, load, orders, url = await parts(max_gpu_budget=2)
    load.value = PoolLoad(kv_usage=0.1)
    source.frontend_load = FrontendLoad(num_open=9, num_queued=8, queued_tokens=24_000)

    async def has_grown():
        return orders.num_ready == 2

    await until(has_grown)
    rows = await decisions_of(url)
    assert any("8 prompts waiting per worker" in row["reason"] for row in rows)


async def test_advisory_planner_orders_nothing(parts):
    _, _, orders, url = await parts(operation=False)

    async def has_decided():
        return len(await decisions_of(url)) >= 2

    await until(has_decided)
    assert orders.decisions == []
    assert (await decisions_of(url))[0]["outcome"] == "advisory"


async def test_planner_that_only_tells_keeps_no_other_one_from_acting(parts):
    _, _, _, url = await parts(operation=False)

    async def has_decided():
        return bool(await decisions_of(url))

    await until(has_decided)
    _, _, orders, _ = await parts(max_gpu_budget=3)

    async def has_grown():
        return orders.num_ready == 3 and not (await decisions_of(url))[0]["is_leader"]

    await until(has_grown)
    assert (await decisions_of(url))[-1]["is_leader"]  # as long as it was alone


def make_idle_planner(orders, registry, instance_id=1):
    """A planner of a model that nobody asks for, which may go down to no worker."""
    clock, source, load = virtual.VirtualClock(), Source(), Load()
    source.reading, source.frontend_load = Fresh(Traffic(num_requests=0.0)), FrontendLoad()
    load.value = PoolLoad()
    service = PlannerService(
        ScalingConfig(adjustment_interval=10.0, min_endpoint=0, scale_down_delay=0),
        source,
        orders,
        Leadership(registry, "n", instance_id, clock),
        clock,
        loads=(load, load),
        wake_up=WakeUpPromise(registry, namespace="n", model="m", instance_id=instance_id),
    )
    return service, clock


async def test_request_for_a_sleeping_model_may_wait_for_the_next_decision_and_the_start():
    registry, orders = memory.MemoryDiscovery(memory.MemoryRegistry()), Orders()
    orders.num_ready = 0
    service, _ = make_idle_planner(orders, registry)
    await service.start("127.0.0.1", 0)
    try:
        starts = {}

        async def is_promised():
            starts.update(await registry.get_prefix(instances.STARTS))
            return bool(starts)

        await until(is_promised)
    finally:
        await service.close()

    (start,) = starts.values()
    assert msgspec.json.decode(start)["estimate_s"] == 10.0 + 1.0  # which `Orders` measured


async def test_last_worker_goes_when_frontends_know_that_a_request_starts_one():
    """They refuse requests for a model that has no worker and no start, and the next decision may be minutes away."""
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())

    class WatchedOrders(Orders):
        async def scale(self, decision):
            self.starts = await registry.get_prefix(instances.STARTS)
            await super().scale(decision)

    orders = WatchedOrders()
    service, _ = make_idle_planner(orders, registry)
    await service.start("127.0.0.1", 0)
    await until(lambda: _is_true(orders.decisions))
    await service.close()

    assert orders.decisions == [(0, 0)]
    assert orders.starts


async def test_planner_that_takes_over_announces_at_once_that_a_request_starts_a_worker():
    """The announcement of the one that is gone has gone with it."""
    shared = memory.MemoryRegistry()
    registries = [memory.MemoryDiscovery(shared), memory.MemoryDiscovery(shared)]
    services = []
    for number, registry in enumerate(registries):
        orders = Orders()
        orders.num_ready = 0
        services.append(make_idle_planner(orders, registry, number + 1))
        await services[-1][0].start("127.0.0.1", 0)
    (first, _), (second, clock) = services
    await clock.advance(10)
    await first.close()
    await registries[0].close()
    assert not await registries[1].get_prefix(instances.STARTS)
    await clock.advance(10)
    starts = await registries[1].get_prefix(instances.STARTS)
    await second.close()

    assert [key.rpartition("-")[2] for key in starts] == ["2"]
    assert orders.decisions == []


async def test_failure_of_the_connector_does_not_end_the_planner(parts):
    _, _, orders, url = await parts()
    orders.error = errors.Unavailable("no cluster")

    async def has_decided():
        return len(await decisions_of(url)) >= 3

    await until(has_decided)
    orders.error = None
    await until(lambda: _is_true(orders.decisions))


async def _is_true(value):
    return bool(value)


async def test_missing_traffic_holds_the_workers(parts):
    source, _, orders, url = await parts()
    source.reading = Missing("nothing listens")

    async def has_skipped():
        return (await decisions_of(url) or [{}])[0].get("outcome") == "skipped"

    await until(has_skipped)
    number, num_rows = orders.num_ready, len(await decisions_of(url))

    async def has_decided_again():
        return len(await decisions_of(url)) >= num_rows + 3

    await until(has_decided_again)
    assert orders.num_ready == number


class Question:
    """A call of a console that asks what twice the load would bring."""

    body = msgspec.msgpack.encode(planner_report.PlannerQuery(factor=2.0))

    def __init__(self):
        self.answer = asyncio.get_running_loop().create_future()

    def reply(self, value):
        self.answer.set_result(value)

    def finish(self):
        """Nothing follows."""


async def test_future_is_simulated_though_the_files_of_the_profile_are_gone(parts, tmp_path):
    profile_files.write_profile(make_profile(), tmp_path)
    _, load, _, url = await parts(policy="predictive", profile_results_dir=str(tmp_path))

    async def has_decided():
        return len(await decisions_of(url)) >= 1

    await until(has_decided)
    (tmp_path / profile_files.DECODE_FILE).unlink()
    question, stop = Question(), asyncio.Event()
    load.service.answer_report(question)
    async with asyncio.timeout(PATIENT_S):
        report = await question.answer
    stop.set()
    await load.service.run(stop)  # which raises the error of a task that died

    assert report.what_if


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0, 1e9])
async def test_question_for_an_impossible_load_is_refused_and_the_planner_lives(parts, factor):
    """The simulation of NaN times the load failed, and with its task the planner ended."""
    _, load, _, url = await parts()

    async def has_decided():
        return len(await decisions_of(url)) >= 1

    await until(has_decided)
    question, stop = Question(), asyncio.Event()
    question.body = msgspec.msgpack.encode({"factor": factor})
    question.fail = question.answer.set_result
    load.service.answer_report(question)
    async with asyncio.timeout(PATIENT_S):
        answer = await question.answer
    stop.set()
    await load.service.run(stop)

    assert isinstance(answer, errors.InvalidRequest)


async def test_younger_planner_stands_by(parts):
    await parts()
    _, _, orders, url = await parts()

    async def has_decided():
        return len(await decisions_of(url)) >= 2

    await until(has_decided)
    assert orders.decisions == []
    assert not (await decisions_of(url))[0]["is_leader"]


async def test_planner_that_takes_over_observes_before_it_acts(parts):
    _, first_load, _, _ = await parts()
    _, _, orders, url = await parts(max_gpu_budget=3)

    async def stands_by():
        return [row for row in await decisions_of(url) if row["outcome"] == "up"]

    await until(stands_by)  # it would add workers, if it were to act
    await first_load.service.close()

    async def has_acted():
        return orders.decisions

    await until(has_acted)
    rows = (await decisions_of(url))[::-1]
    first = next(row for row in rows if row["is_leader"])
    assert first["outcome"] == "skipped"
    assert first["replicas"] == first["present"]
    assert "another planner is gone, this one observes first" in first["reason"]


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_jump_of_the_clock_changes_nothing_and_is_said(parts, jump_s):
    _, load, orders, url = await parts(max_gpu_budget=3)

    async def has_grown():
        return orders.num_ready == 3

    await until(has_grown)
    load.value = PoolLoad()
    clock = load.service._clock
    load.service._clock = types.SimpleNamespace(
        now=lambda: clock.now() + jump_s, wall=lambda: 86_400.0, sleep=clock.sleep
    )

    async def has_said():
        return [row for row in await decisions_of(url) if "clock jumped" in row["reason"]]

    await until(has_said)
    (row,) = await has_said()
    assert (row["outcome"], row["replicas"]) == ("skipped", row["present"])
    assert row["time"] == 86_400.0  # of the clock that the service has


class SteadySource:
    """Five requests a second since the last reading, as the frontends' counters tell them."""

    frontend_load = FrontendLoad(num_open=1)

    def __init__(self, clock):
        self.clock, self.read_at, self.intervals = clock, clock.now(), []

    async def read(self, interval_s):
        self.intervals.append(interval_s)
        elapsed_s, self.read_at = self.clock.now() - self.read_at, self.clock.now()
        return Fresh(Traffic(num_requests=5.0 * elapsed_s))


@pytest.mark.parametrize(("num_failures", "rates"), [(1, [5.0, 5.0]), (30, [None, 5.0])])
async def test_traffic_while_discovery_was_away_is_not_that_of_one_interval(
    monkeypatch, num_failures, rates
):
    clock = virtual.VirtualClock()
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())
    leadership = Leadership(registry, "n", 1, clock)
    source = SteadySource(clock)
    service = PlannerService(
        ScalingConfig(adjustment_interval=10.0),
        source,
        Orders(),
        leadership,
        clock,
        loads=(Load(), Load()),
    )
    await leadership.join()
    deciding = asyncio.ensure_future(service._decide_for_ever())
    await clock.advance(21)
    with monkeypatch.context() as patch:

        async def refuse(prefix):
            raise errors.Unavailable("etcd is away")

        patch.setattr(registry, "get_prefix", refuse)
        await clock.advance(10 * num_failures)
    num_before = len(service._decisions)
    await clock.advance(20)
    deciding.cancel()

    assert [row.requests_per_s for row in service._decisions][num_before:] == rates
    if num_failures == 1:
        assert source.intervals[num_before:] == [20.0, 10.0]  # of which Prometheus is asked


async def test_planner_closes_its_port_while_discovery_is_away(monkeypatch):
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())
    clock = clocks.SystemClock()
    service = PlannerService(
        ScalingConfig(),
        Source(),
        Orders(),
        Leadership(registry, "n", 1, clock),
        clock,
        loads=(Load(), Load()),
    )
    port = await service.start("127.0.0.1", 0)

    async def refuse(key):
        raise errors.Unavailable("etcd is away")

    monkeypatch.setattr(registry, "delete", refuse)
    await service.close()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_decisions_are_json_for_people(parts):
    _, _, _, url = await parts()

    async def has_decided():
        return bool(await decisions_of(url))

    await until(has_decided)
    assert set(json.loads(json.dumps((await decisions_of(url))[0]))) == {
        "time", "outcome", "is_leader", "present", "replicas", "reason",
        "requests_per_s", "kv_usage", "num_running",
    }  # fmt: skip


async def test_full_disk_costs_lines_of_the_log_and_no_decision(parts, caplog):
    _, load, orders, url = await parts(max_gpu_budget=3)
    load.service._log_file = pathlib.Path("/dev/full")

    async def has_grown():
        return orders.num_ready == 3

    await until(has_grown)
    assert caplog.text.count("decisions are not written to /dev/full") == 1
    assert await decisions_of(url)


async def test_prefill_workers_that_the_mode_leaves_alone_are_warned_of_once(parts, caplog):
    _, _, orders, url = await parts(mode="agg")
    orders.num_prefill = 2

    async def has_decided():
        return len(await decisions_of(url)) >= 3

    await until(has_decided)
    assert caplog.text.count("--mode agg leaves 2 prefill workers as they are") == 1


def test_metrics_show_what_the_profile_says_of_the_present_load():
    shown = PlannerMetrics(Targets(), "m")
    observation = Observation(
        at=0.0,
        interval_s=1.0,
        traffic=Missing(""),
        decode_load=PoolLoad(waiting_tokens=70),
    )
    proposal = Proposal(
        replicas=Replicas(0, 1),
        reason="",
        estimate=Estimate(ttft_s=0.3, itl_s=0.02, prompts_per_s=4.0),
    )
    decision = Decision(
        at=0.0,
        present=Replicas(0, 1),
        replicas=Replicas(0, 1),
        outcome="hold",
        reason="",
        proposal=proposal,
    )
    shown.record(observation, decision, is_leader=True)

    page = shown.registry.render().decode()
    assert 'dynamo_planner_estimated_ttft_ms{model_name="m"} 300.0' in page
    assert 'dynamo_planner_estimated_itl_ms{model_name="m"} 20.0' in page
    assert 'dynamo_planner_engine_prefill_requests_per_second{model_name="m"} 4.0' in page
    assert 'dynamo_planner_engine_queued_decode_kv_tokens{model_name="m"} 70.0' in page
