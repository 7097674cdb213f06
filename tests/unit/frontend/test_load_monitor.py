"""The loads of workers that are received, over the event plane in memory."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from frontend_rig import NAME

from dynamo.base import errors, tasks
from dynamo.frontend.admission import busy_workers, load_thresholds
from dynamo.frontend.console import recorder as recording
from dynamo.protocols import instances, load
from dynamo.runtime import events
from dynamo.runtime.backends import memory
from dynamo.testing import clock as virtual

TOPIC = "dynamo/backend/kv_metrics"
EVENT = load.LoadEvent(
    worker_id=7,
    data=load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=0, request_total_slots=1, num_requests_waiting=0
        ),
        kv_stats=load.KvStats(kv_active_blocks=1, kv_total_blocks=1),
    ),
)


@pytest.fixture
async def rig():
    """Receive the loads of one model's workers, and publish them."""
    bus = memory.MemoryBus()
    made = SimpleNamespace(clock=virtual.VirtualClock(), num_changes=0)
    made.speaker = memory.MemoryEventPlane(bus, 7)
    await made.speaker.advertise(TOPIC)

    def changed():
        made.num_changes += 1

    known = made.known = SimpleNamespace(
        ready=[SimpleNamespace(replicas={NAME: None})], find=lambda name: SimpleNamespace(name=name)
    )
    plane, running = memory.MemoryEventPlane(bus, 8), tasks.Tasks()
    made.plane = plane
    thresholds = busy_workers.BusyThresholds(active_decode_blocks_threshold=0.5)
    busy = load_thresholds.BusyWorkers(known, thresholds, plane, made.clock, running)
    busy.on_change(changed)
    busy.start()
    made.loads = busy.loads
    await settle()
    yield made
    await running.close()
    await plane.close()
    await made.speaker.close()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_reported_load_is_recorded_and_waiting_requests_are_checked(rig):
    before = rig.num_changes
    rig.speaker.publish(TOPIC, msgspec.msgpack.encode(EVENT))
    await settle()

    assert len(rig.loads) == 1
    assert rig.num_changes == before + 1


async def test_loads_are_heard_once_the_event_plane_is_back(rig, monkeypatch):
    """NATS may be away when the first worker of an endpoint comes."""
    subscribe = rig.plane.subscribe

    async def refuse(topic, listener):
        monkeypatch.setattr(rig.plane, "subscribe", subscribe)
        raise errors.Unavailable("NATS is gone")

    monkeypatch.setattr(rig.plane, "subscribe", refuse)
    topic = "dynamo/other/kv_metrics"
    await rig.speaker.advertise(topic)
    rig.known.ready[0].replicas[instances.EndpointName("dynamo", "other", "generate")] = None
    await rig.clock.advance(2 * load_thresholds.REFRESH_INTERVAL_S)
    rig.speaker.publish(topic, msgspec.msgpack.encode(EVENT))
    await settle()

    assert len(rig.loads) == 1


async def test_thresholds_of_a_sibling_are_taken_over_except_what_was_changed_here(rig):
    def made():
        return load_thresholds.BusyWorkers(rig.known, no_thresholds, rig.plane, rig.clock, running)

    no_thresholds, running, answers = busy_workers.BusyThresholds(), tasks.Tasks(), []
    sibling, restarted = made(), made()
    for share, model, busy in ((0.5, "a", sibling), (0.6, "b", sibling), (0.7, "b", restarted)):
        change = load_thresholds.ThresholdChange(model=model, active_decode_blocks_threshold=share)
        await busy.change_thresholds(change)
    sibling.show_changed(SimpleNamespace(respond=lambda status, body: answers.append(body)))
    restarted.take_over(answers)
    shares = [restarted.thresholds_of(name).active_decode_blocks_threshold for name in "abc"]
    await running.close()

    assert shares == [0.5, 0.7, None]
    assert restarted.is_active


async def test_malformed_report_is_logged_and_ignored(rig, caplog):
    rig.speaker.publish(TOPIC, b"nonsense")
    rig.speaker.publish(TOPIC, msgspec.msgpack.encode(EVENT))
    await settle()

    assert "ignored the load reported by 7" in caplog.text
    assert len(rig.loads) == 1


async def test_load_of_a_silent_worker_is_dropped_and_waiting_requests_are_checked(rig):
    rig.speaker.publish(TOPIC, msgspec.msgpack.encode(EVENT))
    await settle()
    before = rig.num_changes
    await rig.clock.advance(busy_workers.STALE_S + 2 * load_thresholds.REFRESH_INTERVAL_S)
    await settle()

    assert len(rig.loads) == 0
    assert rig.num_changes > before


def test_console_shows_the_load_of_all_ranks_of_a_worker():
    recorder = recording.ConsoleRecorder(virtual.VirtualClock())
    loads = [
        load.ForwardPassMetrics(
            worker_stats=load.WorkerStats(
                request_active_slots=2 + rank,
                request_total_slots=8,
                num_requests_waiting=rank,
                data_parallel_rank=rank,
            ),
            kv_stats=load.KvStats(
                kv_active_blocks=40 + rank, kv_total_blocks=100, gpu_prefix_cache_hit_rate=rank / 2
            ),
        )
        for rank in (0, 1, 1)
    ]
    payloads = [msgspec.msgpack.encode(load.LoadEvent(worker_id=7, data=one)) for one in loads]
    recorder._receive_loads(
        [
            events.Event(topic=TOPIC, publisher=7, number=number, payload=payload)
            for number, payload in enumerate(payloads)
        ]
    )
    shown = recorder.load_of(7).data

    assert shown.worker_stats.request_active_slots == 2 + 3
    assert shown.worker_stats.num_requests_waiting == 1
    assert shown.kv_stats == load.KvStats(
        kv_active_blocks=81, kv_total_blocks=200, gpu_prefix_cache_hit_rate=0.25
    )
