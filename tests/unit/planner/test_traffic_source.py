from urllib import parse

import msgspec
import pytest

from dynamo.base import errors
from dynamo.planner import traffic_source
from dynamo.planner.observation import Fresh, Missing, ReportedLoad, Stale
from dynamo.planner.traffic_source import (
    FrontendLoad,
    FrontendSource,
    LoadSource,
    PrometheusSource,
    parse_metrics,
    sum_models,
)
from dynamo.protocols import instances, load, model_card
from dynamo.runtime import events
from dynamo.runtime.backends import memory
from dynamo.runtime.http import exchange, server
from dynamo.testing import clock as virtual

PAGE = """# HELP dynamo_frontend_requests_started_total Requests
dynamo_frontend_requests_started_total{{endpoint="chat",model="m",request_type="stream"}} {started}
dynamo_frontend_requests_started_total{{endpoint="chat",model="other",request_type="stream"}} 99.0
dynamo_frontend_input_sequence_tokens_sum{{model="m"}} {tokens}
dynamo_frontend_input_sequence_tokens_count{{model="m"}} {started}
dynamo_frontend_cached_tokens_sum{{model="m"}} {cached}
dynamo_frontend_inter_token_latency_seconds_sum{{model="m"}} NaN
dynamo_frontend_inflight_requests{{model="m"}} 3.0
"""


@pytest.fixture
async def page():
    """A server whose /metrics and answers to queries a test sets."""

    class Page:
        text, answer, url = "", b"{}", ""

    pages = Page()

    def respond(request):
        is_query = request.request.path == "/api/v1/query"
        request.respond(200, pages.answer if is_query else pages.text.encode())

    table = {("GET", "/metrics"): respond, ("GET", "/api/v1/query"): respond}
    http = server.HttpServer(exchange.HttpRouter(table, error_body=server.plain_error))
    pages.url = f"http://127.0.0.1:{await http.start('127.0.0.1', 0)}"
    yield pages
    await http.close()


@pytest.mark.parametrize("url", ["localhost:9090", "prometheus", "ftp://prometheus"])
def test_address_that_no_reading_could_ask_is_refused_at_the_start(url):
    for make in (PrometheusSource, lambda url, *rest: FrontendSource([url], *rest)):
        with pytest.raises(errors.ConfigError, match=r"expected one such as http://127"):
            make(url, None, virtual.VirtualClock())


def test_planner_without_any_frontend_to_ask_is_refused_at_the_start():
    with pytest.raises(errors.ConfigError, match="DYN_PLANNER_FRONTEND_URL: expected at least one"):
        FrontendSource((), None, virtual.VirtualClock())


def test_values_of_one_model_are_summed_and_nonsense_is_left_out():
    values = sum_models(parse_metrics(PAGE.format(started=5, tokens=500, cached=0)), {"m"})

    assert values["requests_started_total"] == 5
    assert "inter_token_latency_seconds_sum" not in values


async def test_traffic_is_the_difference_of_two_readings(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=5, tokens=500, cached=0)
    first = await source.read(10)
    page.text = PAGE.format(started=15, tokens=2500, cached=1000)
    second = await source.read(10)

    assert isinstance(first, Missing)
    assert second.value.num_requests == 10
    assert second.value.isl == 200
    assert second.value.hit_rate == 0.5
    assert second.value.osl is None
    assert source.frontend_load.num_open == 3


ADAPTERS = """dynamo_frontend_requests_started_total{{endpoint="chat",model="poet",request_type="stream"}} {poet}
dynamo_frontend_inflight_requests{{model="poet"}} 2.0
dynamo_frontend_requests_started_total{{endpoint="chat",model="po\\"et+",request_type="stream"}} {quoted}
"""


async def test_requests_for_adapters_of_the_model_are_its_traffic(page):
    adapters = {"Poet"}

    async def list_adapters(model):
        return adapters

    source = FrontendSource([page.url], "M", virtual.VirtualClock(), list_adapters=list_adapters)

    def page_of(started, poet, quoted):
        base = PAGE.format(started=started, tokens=0, cached=0)
        return base + ADAPTERS.format(poet=poet, quoted=quoted)

    page.text = page_of(5, 100, 1000)
    await source.read(10)
    page.text = page_of(6, 107, 1020)
    adapters = {
        "Poet",
        'po"et+',
    }  # it was loaded before, too: what it had then is no traffic of now
    assert (await source.read(10)).value.num_requests == 1 + 7 + 20
    assert source.frontend_load.num_open == 3 + 2
    page.text = page_of(6, 110, 1021)
    adapters = {'po"et+'}  # the other one was unloaded since the last reading
    assert (await source.read(10)).value.num_requests == 3 + 1
    page.text = page_of(6, 115, 1021)
    assert (await source.read(10)).value.num_requests == 0


async def test_prometheus_is_asked_for_adapters_of_the_model(monkeypatch):
    queries = []

    async def get(url):
        queries.append(parse.unquote_plus(url.partition("query=")[2]))
        return b'{"data":{"result":[]}}'

    async def list_adapters(model):
        return {'po"et+'}

    monkeypatch.setattr(traffic_source, "get", get)
    clock = virtual.VirtualClock()
    await PrometheusSource("http://p", "M", clock, list_adapters=list_adapters).read(30)
    labels = r'{model=~"m|po\"et\\+"}'

    assert f"sum(dynamo_frontend_inflight_requests{labels})" in queries


async def test_adapters_of_a_model_are_read_from_its_cards():
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())
    cards = {"1": ("M", ("poet", "clerk")), "2": ("m", ("poet", "other")), "3": ("other", ("x",))}
    for number, (name, adapters) in cards.items():
        instance = instances.Instance(
            namespace="dynamo", component="backend", endpoint="generate",
            instance_id=int(number), transport={},
        )  # fmt: skip
        card = model_card.ModelCard(
            display_name=name, source_path=name, context_length=1, kv_cache_block_size=1,
            lora_names=adapters,
        )  # fmt: skip
        key, record = card.record_for(instance)
        await registry.put(key, msgspec.json.encode(record))
    await registry.put(f"{instances.CARDS}dynamo/backend/generate/4", b"no card")

    assert await traffic_source.read_adapters(registry, "m") == {"poet", "clerk"}


async def test_frontends_are_not_read_while_adapters_are_unknown(page):
    async def list_adapters(model):
        raise errors.Unavailable("discovery is away")

    page.text = PAGE.format(started=5, tokens=500, cached=0)
    for source in (
        FrontendSource([page.url], "m", virtual.VirtualClock(), list_adapters=list_adapters),
        PrometheusSource(page.url, "m", virtual.VirtualClock(), list_adapters=list_adapters),
    ):
        assert (await source.read(10)) == Missing("discovery is away")


async def test_further_prompts_of_a_request_are_sequences_of_their_own(page):
    """A completion request may have a list of them; the metrics of an answer are then of all of them."""
    source = FrontendSource([page.url], "m", virtual.VirtualClock())

    def page_of(started, further, answer_tokens):
        return PAGE.format(started=started, tokens=0, cached=0) + (
            f'dynamo_frontend_further_prompts_total{{model="m"}} {further}\n'
            f'dynamo_frontend_output_sequence_tokens_sum{{model="m"}} {answer_tokens}\n'
            f'dynamo_frontend_output_sequence_tokens_count{{model="m"}} {started}\n'
        )

    page.text = page_of(5, 0, 0)
    await source.read(10)
    page.text = page_of(15, 30, 1200)
    traffic = (await source.read(10)).value

    assert (traffic.num_requests, traffic.osl) == (40, 30)


async def test_lengths_of_prompts_are_read_from_the_buckets_of_the_interval(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())

    def page_of(up_to_100, up_to_200, in_all):
        name = 'dynamo_frontend_input_sequence_tokens_bucket{model="m",le='
        edges = (("100.0", up_to_100), ("200.0", up_to_200), ("+Inf", in_all))
        lines = [f'{name}"{edge}"}} {number}\n' for edge, number in edges]
        return PAGE.format(started=5, tokens=500, cached=0) + "".join(lines)

    page.text = page_of(5, 5, 5)
    await source.read(10)
    page.text = page_of(5, 13, 15)
    lens = (await source.read(10)).value.prompt_lens

    assert lens == {112.5: 2, 137.5: 2, 162.5: 2, 187.5: 2, 200: 2}


async def test_requests_in_the_queues_of_routers_are_read(page):
    source = FrontendSource([page.url, page.url], "m", virtual.VirtualClock())
    labels = 'model="m",policy_class="default",worker_type="aggregated"'
    page.text = PAGE.format(started=5, tokens=500, cached=0) + (
        f"dynamo_frontend_router_queue_pending_requests{{{labels}}} 4.0\n"
        f"dynamo_frontend_router_queue_pending_isl_tokens{{{labels}}} 1200.0\n"
    )
    await source.read(10)

    assert source.frontend_load == FrontendLoad(num_open=6, num_queued=8, queued_tokens=2400)


async def test_requests_that_are_refused_are_no_traffic(page):
    """A client that sends its bad request again and again buys no worker."""
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    labels = 'endpoint="chat",model="m",request_type="stream",status="error"'

    def page_of(started, refused, lost):
        ended = (("validation", refused), ("rate_limit", 1), ("overload", lost), ("", 900))
        return PAGE.format(started=started, tokens=500, cached=0) + "".join(
            f'dynamo_frontend_requests_total{{error_type="{error}",{labels}}} {number}.0\n'
            for error, number in ended
        )

    page.text = page_of(5, 2, 0)
    await source.read(10)
    page.text = page_of(105, 82, 7)

    assert (await source.read(10)).value.num_requests == 20


UNKNOWN = 'requests_started_total{endpoint="chat",model="unknown",request_type="unary"}'


async def test_requests_that_no_model_has_are_no_traffic(page):
    source = FrontendSource([page.url], None, virtual.VirtualClock())

    def page_of(started, unknown):
        text = PAGE.format(started=started, tokens=500, cached=0)
        return f"{text}dynamo_frontend_{UNKNOWN} {unknown}\n"

    page.text = page_of(5, 100)
    await source.read(10)
    page.text = page_of(7, 900)

    assert (await source.read(10)).value.num_requests == 2


async def test_questions_which_worker_would_answer_are_no_traffic(page):
    """An endpoint picker asks before each request, which then comes to a frontend as well."""
    source = FrontendSource([page.url], "m", virtual.VirtualClock())

    def page_of(number):
        name = "dynamo_frontend_request_duration_seconds"
        return PAGE.format(started=2 * number, tokens=500, cached=0) + (
            f'dynamo_frontend_id_queries_total{{model="m"}} {number}\n'
            f'{name}_sum{{model="m"}} {4 * number}\n{name}_count{{model="m"}} {2 * number}\n'
        )

    page.text = page_of(5)
    await source.read(10)
    page.text = page_of(12)
    traffic = (await source.read(10)).value

    assert (traffic.num_requests, traffic.duration_s) == (7, 4)


async def test_no_request_is_a_measured_zero(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=5, tokens=500, cached=0)
    await source.read(10)

    assert (await source.read(10)).value.num_requests == 0


async def test_frontends_behind_one_address_are_read_one_by_one(monkeypatch):
    """A Service leads to any one of them; the difference of two of their counters is no traffic."""
    started = {"a": 1000, "b": 10}
    urls = {"http://service:8000": ["http://a", "http://b"]}

    async def get(url):
        name = url.removeprefix("http://").removesuffix("/metrics")
        return PAGE.format(started=started[name], tokens=0, cached=0).encode()

    async def expand(url):
        return urls[url]

    monkeypatch.setattr(traffic_source, "get", get)
    clock = virtual.VirtualClock()
    source = FrontendSource(["http://service:8000"], "m", clock, expand=expand)
    assert isinstance(await source.read(10), Missing)
    started |= {"a": 1003, "b": 14}
    assert (await source.read(10)).value.num_requests == 7
    assert source.frontend_load.num_open == 6
    started |= {"a": 1004, "b": 16, "c": 500}
    urls["http://service:8000"] = ["http://b", "http://c"]
    assert (await source.read(10)).value.num_requests == 2
    started |= {"b": 17, "c": 505}
    assert (await source.read(10)).value.num_requests == 6


async def test_counter_that_fell_counts_from_zero(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=50, tokens=500, cached=0)
    await source.read(10)
    page.text = PAGE.format(started=4, tokens=40, cached=0)

    assert (await source.read(10)).value.num_requests == 4


async def test_mean_of_a_frontend_that_was_restarted_is_that_of_its_new_requests(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=50, tokens=500, cached=0)
    await source.read(10)
    page.text = PAGE.format(started=4, tokens=1200, cached=0)

    assert (await source.read(10)).value.isl == 300


async def test_frontend_that_does_not_answer_is_missing_then_stale(page):
    clock = virtual.VirtualClock()
    source = FrontendSource([page.url], "m", clock)
    page.text = PAGE.format(started=5, tokens=500, cached=0)
    await source.read(10)
    source._urls = ["http://127.0.0.1:1/metrics"]
    soon = await source.read(10)
    await clock.advance(40)
    late = await source.read(10)

    assert isinstance(soon, Missing)
    assert "127.0.0.1:1" in soon.reason
    assert isinstance(late, Stale)
    assert late.age_s == 40


async def test_traffic_of_a_gap_is_not_that_of_one_interval(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=5, tokens=500, cached=0)
    await source.read(10)
    page.text = ""
    await source.read(10)
    page.text = PAGE.format(started=905, tokens=500, cached=0)

    assert isinstance(await source.read(10), Missing)
    page.text = PAGE.format(started=907, tokens=500, cached=0)
    assert (await source.read(10)).value.num_requests == 2


async def test_prometheus_is_asked(page):
    rows = {"data": {"result": [{"metric": {"le": "100.0"}, "value": [0, "7"]}]}}
    page.answer = msgspec.json.encode(rows)
    reading = await PrometheusSource(page.url, "m", virtual.VirtualClock()).read(30)

    assert isinstance(reading, Fresh)
    assert (
        reading.value.num_requests == 7
    )  # seven that were started, or asked for an id, or further prompts
    assert reading.value.prompt_lens == {50.0 * (1 + 2 * part) / 4: 7 / 4 for part in range(4)}
    assert reading.value.isl == 1


@pytest.mark.parametrize(("model", "labels"), [("M", ',model="m"'), (None, ',model!="unknown"')])
async def test_prometheus_is_asked_for_requests_without_those_that_were_refused(
    monkeypatch, model, labels
):
    queries = []

    async def get(url):
        queries.append(parse.unquote_plus(url.partition("query=")[2]))
        return b'{"data":{"result":[]}}'

    monkeypatch.setattr(traffic_source, "get", get)
    await PrometheusSource("http://prometheus", model, virtual.VirtualClock()).read(30)
    series = f'dynamo_frontend_requests_total{{error_type=~"validation|rate_limit"{labels}}}[30s]'

    assert queries[0].endswith(f" - (sum(increase({series})) or vector(0))")


@pytest.mark.parametrize(
    "answer",
    [
        *(b"no json", b'{"data":{"result":[]}}', b'{"status":"error"}'),
        b'{"data":{"result":[1757000000,"7"]}}',  # a scalar, of another server
    ],
)
async def test_prometheus_without_a_value_is_missing(page, answer):
    page.answer = answer

    reading = await PrometheusSource(page.url, "m", virtual.VirtualClock()).read(30)
    assert isinstance(reading, Missing)


async def test_interval_that_is_too_short_for_two_scrapes_of_prometheus_is_named(page):
    page.answer = b'{"data":{"result":[]}}'

    reading = await PrometheusSource(page.url, "m", virtual.VirtualClock()).read(10.2)
    assert (
        'no two values of dynamo_frontend_requests_started_total{model="m"} in 10s'
        in reading.reason
    )
    assert "expected --adjustment-interval to be at least twice" in reading.reason


def answer_sums(monkeypatch, known):
    """Answer queries for sums of series with these values; of other series there are none."""

    async def get(url):
        number = known.get(parse.unquote(url).partition("sum(")[2].partition("{")[0])
        rows = [] if number is None else [{"metric": {}, "value": [0, number]}]
        return msgspec.json.encode({"data": {"result": rows}})

    monkeypatch.setattr(traffic_source, "get", get)


async def test_request_for_a_model_that_was_never_served_is_read_from_prometheus(monkeypatch):
    """Its counters come into being with the first worker, which this request is to start."""
    known = {"dynamo_frontend_requests_waiting_for_worker": "1"}
    answer_sums(monkeypatch, known)
    source = PrometheusSource("http://prometheus", "m", virtual.VirtualClock())
    never_served = await source.read(10)
    known["dynamo_frontend_requests_started_total"] = "1"  # by now; one scrape tells no increase

    assert never_served.value.num_requests == 0
    assert source.frontend_load.num_open == 1
    assert isinstance(await source.read(10), Missing)


async def test_model_that_nobody_has_asked_for_yet_has_no_traffic_in_prometheus(monkeypatch):
    """A counter of requests comes into being with the first of them."""
    answer_sums(monkeypatch, {"dynamo_frontend_inflight_requests": "0"})
    reading = await PrometheusSource("http://prometheus", "m", virtual.VirtualClock()).read(10)

    assert isinstance(reading, Fresh)
    assert reading.value.num_requests == 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0", "many"])
async def test_count_of_requests_that_is_no_number_is_missing_and_no_zero(page, value):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=5, tokens=500, cached=0)
    await source.read(10)
    page.text = PAGE.format(started=value, tokens=500, cached=0)

    assert isinstance(await source.read(10), Missing)


async def test_page_without_metrics_of_a_frontend_is_missing(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = "<html>under maintenance</html>"

    assert isinstance(await source.read(10), Missing)


async def test_mean_with_a_sum_that_is_no_number_is_left_out(page):
    source = FrontendSource([page.url], "m", virtual.VirtualClock())
    page.text = PAGE.format(started=5, tokens="NaN", cached=0)
    await source.read(10)
    page.text = PAGE.format(started=9, tokens="NaN", cached=0)
    traffic = (await source.read(10)).value

    assert (traffic.num_requests, traffic.isl) == (4, None)


class Plane:
    async def subscribe(self, topic, receive):
        self.receive = receive


def report(worker_id, waiting_tokens, *last_passes, num_active=1, is_draining=False):
    event = load.LoadEvent(
        worker_id=worker_id,
        is_draining=is_draining,
        data=load.ForwardPassMetrics(
            worker_stats=load.WorkerStats(
                request_active_slots=1,
                request_total_slots=8,
                num_requests_waiting=0,
                active_prefill_tokens=waiting_tokens,
            ),
            kv_stats=load.KvStats(kv_active_blocks=num_active, kv_total_blocks=4),
            last_passes=last_passes,
        ),
    )
    payload = msgspec.msgpack.encode(event)
    return events.Event(topic="kv_metrics", publisher=worker_id, number=0, payload=payload)


async def test_forward_passes_are_those_since_the_last_reading():
    plane = Plane()
    source = LoadSource(plane, "kv_metrics", virtual.VirtualClock())
    await source.start()
    first, second = (
        load.ForwardPass(num_prompt_tokens=n, num_kv_tokens=0, wall_s=0.1) for n in (10, 20)
    )
    reports = [report(1, 5, first), report(1, 7, first), report(1, 9, first, second)]
    plane.receive([*reports, report(2, 3)])
    read = source.read()
    again = source.read()

    assert read.workers == (
        ReportedLoad(waiting_tokens=9, passes=(first, second)),
        ReportedLoad(waiting_tokens=3),
    )
    assert [worker.passes for worker in again.workers] == [(), ()]


async def test_load_of_workers_that_have_not_reported_for_long_is_unknown():
    plane, clock = Plane(), virtual.VirtualClock()
    source = LoadSource(plane, "kv_metrics", clock)
    await source.start()
    before = source.read()
    plane.receive([report(1, 5)])
    reported = source.read()
    await clock.advance(30)

    assert [before.is_reported, reported.is_reported] == [False, True]
    assert not source.read().is_reported


async def test_worker_that_drains_counts_only_by_what_it_runs():
    plane = Plane()
    source = LoadSource(plane, "kv_metrics", virtual.VirtualClock())
    await source.start()
    plane.receive([report(1, 9, num_active=4), report(2, 5, num_active=0, is_draining=True)])
    read = source.read()

    assert (read.kv_usage, read.num_running, read.waiting_tokens) == (1.0, 2, 9)
    assert read.workers == (ReportedLoad(waiting_tokens=9),)
