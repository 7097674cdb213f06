"""The page of metrics of the aggregator, `python -m dynamo.metrics`."""

import msgspec
import pytest

from dynamo.base import clock as clocks
from dynamo.base import config, errors
from dynamo.protocols import instances, load
from dynamo.router import load_metrics
from dynamo.runtime import component, events


def test_counters_of_a_lost_worker_are_shown_no_more():
    name = instances.EndpointName("dynamo", "backend", "generate")
    page = load_metrics.LoadMetrics(name, "m")
    for worker_id in (1, 2):
        page.count_routed_prompt(worker_id, 4, 1.0)
    page.remove_lost({2})
    page.remove_lost({2})
    text = page.registry.render().decode()

    assert 'worker_id="1"' not in text
    assert text.count('worker_id="2"} 4.0') == text.count('worker_id="2"} 1.0') == 1


async def test_event_that_is_no_text_is_left_out_and_the_next_one_counted():
    async with await component.DistributedRuntime.in_memory(component.MemoryCluster()) as runtime:
        page = load_metrics.Aggregator(
            load_metrics.AggregatorConfig(), runtime, clocks.SystemClock()
        )
        added = load.AddRequest(token_sequence=(1, 2), isl=8)
        change = load.ActiveSequenceEvent(request_id="~", worker_id=7, router_id="", data=added)
        good = msgspec.msgpack.encode([change])
        page._take_sequences([message(good.replace(b"~", b"\xff")), message(good)])

        assert 'worker_id="7"} 2.0' in page._metrics.registry.render().decode()


def test_port_that_cannot_be_is_refused_at_start():
    argv = ("--port", "70000")
    with pytest.raises(errors.ConfigError, match="--port: expected 0 to 65535, got 70000"):
        config.load(load_metrics.AggregatorConfig, prog="metrics", argv=argv, environ={})


def message(payload):
    return events.Event(topic="t", publisher=1, number=0, payload=payload)
