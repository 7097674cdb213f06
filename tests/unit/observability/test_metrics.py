"""What is counted comes out as Prometheus reads it."""

import asyncio
import http.client

import prometheus_client
import pytest
from prometheus_client import parser

from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.testing import clock


def samples(registry: metrics.Registry) -> dict[str, float]:
    return {
        s.name + str(sorted(s.labels.items())): s.value
        for family in parser.text_string_to_metric_families(registry.render().decode())
        for s in family.samples
    }


def test_names_begin_with_the_prefix():
    registry = metrics.Registry("dynamo_frontend")
    registry.counter("requests_total", "requests", ["model"]).labels("m").inc(3)
    registry.gauge("inflight_requests", "now").set(2)

    assert samples(registry)["dynamo_frontend_requests_total[('model', 'm')]"] == 3
    assert samples(registry)["dynamo_frontend_inflight_requests[]"] == 2


def test_fast_histogram_renders_like_one_of_prometheus_client():
    registry, values = metrics.Registry("x"), (0.0, 0.1, 0.5, 0.5, 3.0)
    fast = registry.fast_histogram("fast", "f", ["model"], buckets=(0.1, 0.5, 1.0)).labels("m")
    slow = registry.histogram("slow", "s", ["model"], buckets=(0.1, 0.5, 1.0)).labels("m")
    for value in values:
        fast.observe(value)
        slow.observe(value)
    seen = samples(registry)
    ours = {k.replace("x_fast", ""): v for k, v in seen.items() if k.startswith("x_fast")}
    theirs = {k.replace("x_slow", ""): v for k, v in seen.items() if k.startswith("x_slow")}

    assert ours == theirs
    assert fast.count == len(values)


def test_equal_values_are_recorded_in_one_call():
    fast = metrics.FastHistogram((1.0, 2.0))
    fast.observe(1.5, times=4)

    assert fast.cumulative() == [("1.0", 0), ("2.0", 4), ("+Inf", 4)]
    assert fast.sum == 6


def test_wrong_number_of_label_values_is_an_error():
    family = metrics.Registry("x").fast_histogram("h", "h", ["model"], buckets=(1,))

    with pytest.raises(ValueError, match="expected values for"):
        family.labels("a", "b")


def test_fast_numbers_render_like_those_of_prometheus_client():
    registry = metrics.Registry("x")
    families = {
        "fast": (registry.fast_counter, registry.fast_gauge),
        "slow": (registry.counter, registry.gauge),
    }
    for name, (counter, gauge) in families.items():
        counter(f"{name}_asked_total", "a", ["model"]).labels("m").inc(3)
        now = gauge(f"{name}_now", "n", ["model"]).labels("m")
        now.inc()
        now.inc(5)
        now.dec()
    seen = samples(registry)

    fast = {k.replace("fast", ""): v for k, v in seen.items() if "fast" in k}
    slow = {k.replace("slow", ""): v for k, v in seen.items() if "slow" in k}
    assert fast == slow
    assert sorted(fast.values()) == [3, 5]


def test_metrics_of_other_libraries_are_rendered_by_prefix(monkeypatch):
    theirs = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("guest:running", "theirs", registry=theirs).set(2)
    prometheus_client.Gauge("python_info", "nobody asked", registry=theirs)
    monkeypatch.setattr(prometheus_client, "REGISTRY", theirs)
    text = metrics.render_foreign("guest:").decode()

    assert "guest:running 2.0" in text
    assert "python_info" not in text


class LateClock(clock.VirtualClock):
    """A clock whose sleeps last `late_s` seconds too long."""

    late_s = 0.0

    async def sleep(self, duration_s):
        await super().sleep(duration_s + self.late_s)


async def test_delays_are_recorded_and_stalls_counted():
    time, registry = LateClock(), metrics.Registry("t")
    task = asyncio.ensure_future(metrics.LoopDelay(registry, time).watch())
    await time.advance(1.05)
    time.late_s = 0.5
    await time.advance(0.75)  # the running sleep ends in time, the next one late
    task.cancel()
    lines = registry.render().decode().splitlines()

    assert 't_event_loop_delay_seconds_bucket{le="0.25"} 11.0' in lines
    assert "t_event_loop_delay_seconds_count 12.0" in lines
    assert "t_event_loop_stall_total 1.0" in lines


def test_push_to_what_is_no_gateway_is_unavailable(monkeypatch):
    def push(*args):
        raise http.client.BadStatusLine("SSH-2.0-OpenSSH")

    monkeypatch.setattr(prometheus_client, "push_to_gateway", push)
    with pytest.raises(errors.Unavailable, match="cannot push metrics to here:1: SSH"):
        metrics.Registry("x").push("here:1", "job")


def test_push_to_a_name_that_no_host_can_have_is_unavailable():
    with pytest.raises(errors.Unavailable, match=r"cannot push metrics to a\.\.b:1: "):
        metrics.Registry("x").push("a..b:1", "job")
