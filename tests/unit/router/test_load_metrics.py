"""The page of metrics of the aggregator, `python -m dynamo.metrics`."""

from dynamo.protocols import instances
from dynamo.router import load_metrics


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
