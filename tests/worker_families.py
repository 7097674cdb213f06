"""The metric families that every worker exports, whatever its engine, with their labels."""

from prometheus_client import parser

ENDPOINT = ("dynamo_component", "dynamo_endpoint", "dynamo_namespace")
FAMILIES = {
    "dynamo_component_requests": ENDPOINT,
    "dynamo_component_request_bytes": ENDPOINT,
    "dynamo_component_response_bytes": ENDPOINT,
    "dynamo_component_inflight_requests": ENDPOINT,
    "dynamo_component_request_duration_seconds": ENDPOINT,
    "dynamo_component_cancellation": ENDPOINT,
    "dynamo_component_errors": (*ENDPOINT, "error_type"),
    "dynamo_component_uptime_seconds": (),
    "dynamo_component_kvstats_active_blocks": (),
    "dynamo_component_kvstats_total_blocks": (),
    "dynamo_component_kvstats_gpu_cache_usage_percent": (),
    "dynamo_component_kvstats_gpu_prefix_cache_hit_rate": (),
    "dynamo_component_total_blocks": ENDPOINT,
    "dynamo_component_gpu_cache_usage_percent": ENDPOINT,
    "dynamo_worker_prefill_latency_ms": ENDPOINT,
}
DURATION_S = "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 20 30 60 120 300 600"


def check(exposition):
    """Assert that a worker's exposition has these families, and no labels but theirs."""
    families = {family.name: family for family in parser.text_string_to_metric_families(exposition)}
    assert FAMILIES.keys() <= families.keys()
    for name, expected in FAMILIES.items():
        for sample in families[name].samples:
            assert tuple(sorted(sample.labels.keys() - {"le"})) == tuple(sorted(expected)), sample
    bounds = [
        float(sample.labels["le"])
        for sample in families["dynamo_component_request_duration_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds == [*map(float, DURATION_S.split()), float("inf")]
