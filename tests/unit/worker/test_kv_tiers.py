"""The monitor of cache tiers: its metrics and its route."""

import msgspec
import pytest

from dynamo.kvbm import pool as pools
from dynamo.kvbm import tier_report, tiered_cache, tiers
from dynamo.observability import metrics
from dynamo.worker import kv_tiers


class Reporter:
    """An engine with 8 blocks of its own and 4 in host memory, of which one is used."""

    def __init__(self):
        self.pool = pools.BlockPool(8)
        host = tiers.Tier(tiered_cache.HOST, 4, self.pool.events)
        self.cache = tiered_cache.TieredCache(self.pool, host, None, block_size=4, block_bytes=64)
        host.confirm(host.reserve((tiers.CachedBlock(1, 1, None),), 0))
        self.has_started = True

    def report_tiers(self):
        return tier_report.make_report(self.pool, self.cache) if self.has_started else None


class Exchange:
    def respond(self, status, body):
        self.status, self.body = status, body


@pytest.fixture
def reporter():
    return Reporter()


def test_metrics_have_the_names_of_kvbm(reporter):
    registry = metrics.Registry("dynamo_component")
    monitor = kv_tiers.KvTierMonitor(reporter, registry)
    reporter.cache.counts["matched_tokens"] = 12
    reporter.cache.counts["disk_lookups"] = 5
    reporter.cache.num_copied[tiered_cache.DEVICE, tiered_cache.HOST] = 3
    monitor.update()
    exposed = registry.render().decode().splitlines()

    assert "kvbm_matched_tokens 12.0" in exposed
    assert "kvbm_offload_blocks_d2h 3.0" in exposed
    assert "kvbm_disk_lookups 5.0" in exposed
    assert 'dynamo_kvbm_memory_utilization_percent{tier="host"} 25.0' in exposed
    assert 'dynamo_kvbm_memory_utilization_percent{tier="device"} 0.0' in exposed


def test_report_is_served_once_the_engine_has_started(reporter):
    monitor = kv_tiers.KvTierMonitor(reporter, metrics.Registry("dynamo_component"))
    handle = monitor.routes()["GET", "/kvbm"]
    reporter.has_started = False
    starting, started = Exchange(), Exchange()
    handle(starting)
    monitor.update()
    reporter.has_started = True
    handle(started)
    report = msgspec.json.decode(started.body)

    assert (starting.status, started.status) == (503, 200)
    assert [tier["tier"] for tier in report["tiers"]] == ["device", "host"]
    assert report["offloading"] == "on"


def test_log_says_that_copying_turned_itself_down_and_up_again(reporter, caplog):
    monitor = kv_tiers.KvTierMonitor(reporter, metrics.Registry("dynamo_component"))
    for is_down in (False, True, True, False):
        reporter.cache.guard.is_down = is_down
        monitor.update()
    down, up = (record.getMessage() for record in caplog.records)

    assert "to host memory: turned down: the tiers gave up nearly all" in down
    assert up == "copies of KV blocks to host memory: on"
