"""Pages of several processes as one."""

from prometheus_client import parser

from dynamo.frontend.processes import peers
from dynamo.observability import metrics


def page(value):
    """Of one process: every kind of family, with and without labels, and a value that looks like labels."""
    registry = metrics.Registry("f")
    registry.counter("requests_total", "Requests", ("model",)).labels('a{b="c"} d').inc(value)
    registry.gauge("clients", "Clients").set(value)
    registry.fast_histogram("wait_seconds", "Wait", ("model",), buckets=(1,)).labels("m").observe(
        value
    )
    registry.gauge("unused", "Nothing yet", ("model",))
    return registry.render().decode()


def rows(text):
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert (sample.name, labels) not in found, "a sample came twice"
            found[sample.name, labels] = (family.type, family.documentation, sample.value)
    return found


def test_every_sample_of_every_process_is_there_once_and_says_whose_it_is():
    merged = rows(peers.merge_metrics({"1": page(1), "2": page(5)}))
    expected = {
        (name, tuple(sorted((*labels, ("http_worker", worker))))): row
        for worker, value in (("1", 1), ("2", 5))
        for (name, labels), row in rows(page(value)).items()
    }

    assert merged == expected


def test_each_family_is_introduced_once():
    text = peers.merge_metrics({"1": page(1), "2": page(5)})
    introductions = [line for line in text.splitlines() if line.startswith("#")]

    assert len(introductions) == len(set(introductions)) == 8


def test_of_nobody_nothing_is_told():
    assert peers.merge_metrics({}) == ""
