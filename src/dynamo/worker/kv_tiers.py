"""The monitor of an engine's KV cache tiers: metrics under the names of NVIDIA Dynamo's KVBM, and a report.

GET /kvbm       200 and the report of the tiers as JSON (`kvbm.tier_report`); 503 while the engine starts
"""

import logging

import msgspec

from dynamo.engine import api
from dynamo.observability import metrics
from dynamo.runtime.http import exchange, server

_logger = logging.getLogger(__name__)
_GAUGES = {
    "matched_tokens": "prompt tokens that were loaded from a tier below the engine's memory",
    "offload_blocks_d2h": "KV blocks copied from the engine's memory to host memory",
    "offload_blocks_h2d": "KV blocks copied from host memory to disk",
    "onboard_blocks_h2d": "KV blocks copied from host memory to the engine's memory",
    "onboard_blocks_d2d": "KV blocks copied from disk, by way of host memory, for the engine's memory",
    "offload_blocks_h2o": "KV blocks copied from host memory to the object store",
    "onboard_blocks_o2h": "KV blocks copied from the object store to host memory",
    "host_cache_hit_rate": "blocks loaded from host memory, of those looked up there, 0 to 1",
    "disk_cache_hit_rate": "blocks loaded from disk, of those looked up there, 0 to 1",
    "host_lookups": "KV blocks of prompts that were looked up in host memory",
    "disk_lookups": "KV blocks of prompts that were looked up on disk, or in the object store",
    "failed_blocks": "KV blocks whose copy failed or whose checksum was wrong",
}


class KvTierMonitor:
    """The monitor of one engine."""

    def __init__(self, reporter: api.KvTierReporter, registry: metrics.Registry) -> None:
        self._reporter = reporter
        self._offloading = "on"  # as of the last update
        view = registry.with_prefix("kvbm")
        self._gauges = {name: view.gauge(name, text) for name, text in _GAUGES.items()}
        self._use = registry.with_prefix("dynamo_kvbm").gauge(
            "memory_utilization_percent",
            "used share of a tier of the KV cache, 0 to 100",
            ("tier",),
        )

    def routes(self) -> dict[tuple[str, str], exchange.Handler]:
        """Return the routes for the system port."""
        return {("GET", "/kvbm"): self._respond}

    def update(self) -> None:
        """Set the metrics to the present state."""
        report = self._reporter.report_tiers()
        if report is None:
            return
        if report.offloading != self._offloading:
            _logger.warning("copies of KV blocks to host memory: %s", report.offloading)
            self._offloading = report.offloading
        values = {
            **report.copied,
            **report.counts,
            "host_cache_hit_rate": report.host_hit_rate,
            "disk_cache_hit_rate": report.disk_hit_rate,
        }
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        for use in report.tiers:
            self._use.labels(use.tier).set(use.used_percent)

    def _respond(self, request: exchange.Exchange) -> None:
        report = self._reporter.report_tiers()
        if report is None:
            body = server.plain_error(503, "the engine has not started yet", "/kvbm")
            request.respond(503, body)
        else:
            request.respond(200, msgspec.json.encode(report))
