"""Requests wait for a worker when none serves."""

import asyncio
import collections
import types

import msgspec
import pytest
from frontend_rig import Worker

from dynamo.base import errors
from dynamo.frontend import waiting
from dynamo.protocols import instances
from dynamo.router import retry_rules
from dynamo.testing import clock as clocks

LIMIT = retry_rules.WaitPolicy(wait_s=5.0, max_waiting=2)


class Expected:
    """Starts that the test announces."""

    def __init__(self, start_s=None):
        self.start_s = start_s

    def estimate_start(self, model, waited_s=0.0):
        return self.start_s


class Asked:
    """A worker that is away until the test says otherwise."""

    def __init__(self, clock, expected, policy=LIMIT, gauge=None):
        self.is_plane_away = False
        self.wait = waiting.WorkerWait(policy, clock, expected, gauge, lambda: self.is_plane_away)
        self.clock, self.error, self.is_over = clock, errors.NoWorkers("nobody"), False

    async def ask(self):
        if self.error is not None:
            raise self.error
        return "answer"

    def begin(self, **options):
        return asyncio.ensure_future(
            self.wait.until_served(self.ask, "m", is_over=lambda: self.is_over, **options)
        )


@pytest.fixture
def asked():
    return Asked(clocks.VirtualClock(), Expected())


async def test_request_is_served_as_soon_as_a_worker_is_there(asked):
    waits = asked.begin()
    await asked.clock.advance(3)
    asked.error = None
    await asked.clock.advance(waiting.PAUSE_S)

    assert await waits == "answer"


async def test_request_is_refused_after_the_limit(asked):
    waits = asked.begin()
    await asked.clock.advance(4.8)
    still_waits = not waits.done()
    await asked.clock.advance(0.5)

    assert still_waits
    with pytest.raises(errors.NoWorkers):
        await waits


async def test_worker_that_comes_after_the_client_has_left_gets_nothing(asked):
    waits = asked.begin()
    await asked.clock.advance(1)
    asked.is_over, asked.error = True, None
    await asked.clock.advance(waiting.PAUSE_S)

    with pytest.raises(errors.NoWorkers):
        await waits


async def test_request_waits_longer_while_a_worker_is_starting():
    asked = Asked(clocks.VirtualClock(), Expected(40.0))
    waits = asked.begin()
    await asked.clock.advance(59)
    still_waits = not waits.done()
    await asked.clock.advance(2)

    assert still_waits
    with pytest.raises(errors.NoWorkers):
        await waits


class Gauge:
    """How many requests wait, by label."""

    def __init__(self):
        self.counts = collections.Counter()

    def labels(self, name):
        return types.SimpleNamespace(
            inc=lambda: self.counts.update([name]), dec=lambda: self.counts.subtract([name])
        )

    @property
    def present(self):
        return dict(+self.counts)


async def test_waiting_request_counts_under_its_model_as_soon_as_a_worker_is_expected():
    asked = Asked(clocks.VirtualClock(), Expected(), gauge=(gauge := Gauge()))
    waits = asked.begin()
    await asked.clock.advance(1)
    counted = [gauge.present]
    asked.wait._expected.start_s = 3.0
    await asked.clock.advance(waiting.PAUSE_S)
    counted.append(gauge.present)
    asked.wait._expected.start_s = None  # it serves, which is not known here yet
    await asked.clock.advance(waiting.PAUSE_S)
    counted.append(gauge.present)
    asked.error = None
    await asked.clock.advance(waiting.PAUSE_S)

    assert await waits == "answer"
    assert counted == [{"unknown": 1}, {"m": 1}, {"m": 1}]
    assert gauge.present == {}


async def test_no_more_new_requests_wait_than_the_limit_allows(asked):
    waits = [asked.begin() for _ in range(3)]
    under_way = asked.begin(is_under_way=True)
    await asked.clock.advance(1)

    assert [each.done() for each in (*waits, under_way)] == [False, False, True, False]
    asked.error = None
    await asked.clock.advance(waiting.PAUSE_S)
    assert await waits[0] == "answer"
    with pytest.raises(errors.NoWorkers):
        await waits[2]


async def test_place_of_an_ended_wait_is_free_again(asked):
    waits = [asked.begin() for _ in range(2)]
    await asked.clock.advance(6)
    assert all(each.exception() is not None for each in waits)
    later = asked.begin()
    await asked.clock.advance(1)
    asked.error = None
    await asked.clock.advance(waiting.PAUSE_S)

    assert await later == "answer"


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_only_requests_under_way_wait_for_busy_workers(asked, is_under_way):
    asked.error = errors.Overloaded("full")
    waits = asked.begin(is_under_way=is_under_way)
    await asked.clock.advance(1)

    assert waits.done() is not is_under_way
    asked.error = None
    await asked.clock.advance(waiting.PAUSE_S)
    assert (waits.exception() is None) is is_under_way


async def test_request_of_a_client_that_left_does_not_wait(asked):
    waits = asked.begin()
    await asked.clock.advance(1)
    asked.is_over = True
    await asked.clock.advance(waiting.PAUSE_S)

    assert waits.exception() is not None


async def test_new_request_waits_for_the_first_worker(bare):
    await bare.start()
    answer = bare.start_task(bare.chat())
    await asyncio.sleep(0)
    await bare.worker()

    assert (await answer).status_code == 200


@pytest.mark.parametrize("ask", ["chat", "embed"])
async def test_client_that_leaves_before_its_model_is_there_counts_as_disconnected(
    bare, ask, caplog
):
    await bare.start(worker_wait_secs=60)
    asking = bare.start_task(bare.chat() if ask == "chat" else bare.embed("a"))
    waiting_ones = bare.frontend._dispatcher.worker_wait._waiting
    await bare.until(lambda: waiting_ones)
    asking.cancel()
    await bare.until(lambda: not waiting_ones)
    counts = await bare.metrics()
    num_rejected = [
        count for name, count in counts.items() if "model_rejection_total" in name and count
    ]

    assert counts["dynamo_frontend_disconnected_clients"] == 1
    assert num_rejected == []
    assert "a request failed" not in caplog.text


async def test_new_request_waits_for_a_restarted_worker(rig):
    await rig.one.runtime.close()
    await rig.until(lambda: not rig.instances)
    answer = rig.start_task(rig.chat())
    embedded = rig.start_task(rig.embed("a"))
    await asyncio.sleep(0)
    await rig.worker()

    assert (await answer).status_code == 200
    assert (await embedded).status_code == 404


async def test_texts_to_embed_wait_for_a_restarted_worker(bare):
    await bare.start()
    killed = await bare.embedder()
    await killed.runtime.requests.close()  # discovery lists it until its lease ends
    answer = bare.start_task(bare.embed("a"))
    waiting_ones = bare.frontend._dispatcher.worker_wait._waiting
    await bare.until(lambda: len(waiting_ones) == 1)
    await killed.runtime.close()
    await bare.until(lambda: bare.frontend.models.get("e") is None)
    await bare.embedder()

    assert (await answer).status_code == 200


async def test_wait_of_texts_to_embed_ends_with_the_time_of_the_request(bare):
    await bare.start(request_timeout_secs=0.5, worker_wait_secs=60)
    killed = await bare.embedder()
    await killed.runtime.requests.close()  # discovery lists it until its lease ends
    answer = await bare.embed("a")

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_request_waits_for_the_announced_first_worker_of_its_model(rig):
    start = instances.WorkerStart(model="q", namespace="dynamo", estimate_s=60.0)
    await rig.one.runtime.discovery.put(f"{instances.STARTS}1", msgspec.json.encode(start))
    await rig.until(lambda: rig.frontend._expected_workers.estimate_start("q") == 60.0)
    answer = rig.start_task(rig.complete(model="q"))
    await asyncio.sleep(0)
    made = await rig.register(Worker, "q", rig.one.name)
    await rig.until(lambda: answer.done())

    assert answer.result().status_code == 200
    assert len(made.requests) == 1
    await rig.one.runtime.discovery.delete(f"{instances.STARTS}1")
    await rig.until(lambda: rig.frontend._expected_workers.estimate_start("q") is None)


async def test_request_waits_for_a_worker_that_sleeps_unless_it_computes_prompts_only(rig):
    for number, role in enumerate(("prefill", "decode")):
        sleeper = instances.SleepingInstance(instance_id=number, role=role, endpoint="dyn://a.b.c")
        start = instances.WorkerStart(
            model=role, namespace="dynamo", estimate_s=60.0, sleeper=sleeper
        )
        key = f"{instances.STARTS}{number:x}"
        await rig.one.runtime.discovery.put(key, msgspec.json.encode(start))
    expected = rig.frontend._expected_workers
    await rig.until(lambda: len(expected.sleeping) == 2)

    assert [expected.estimate_start(role) for role in ("prefill", "decode")] == [None, 60.0]
    assert expected.starts == []


async def test_begun_answer_waits_for_the_plane_and_then_for_its_workers(asked):
    asked.is_plane_away = True
    waits, new = asked.begin(is_under_way=True), asked.begin()
    await asked.clock.advance(60)
    asked.is_plane_away = False
    await asked.clock.advance(4)
    asked.error = None
    await asked.clock.advance(waiting.PAUSE_S)

    assert await waits == "answer"
    with pytest.raises(errors.NoWorkers):
        await new


async def test_begun_answer_waits_for_the_plane_within_a_limit(asked):
    asked.is_plane_away = True
    waits = asked.begin(is_under_way=True)
    await asked.clock.advance(LIMIT.outage_s + LIMIT.wait_s + 1)

    with pytest.raises(errors.NoWorkers):
        await waits


ON_DEMAND = instances.WorkerStart(
    model="q", namespace="dynamo", estimate_s=12.0, is_on_demand=True, context_length=99
)


async def announce(rig, start):
    """Announce a model that is loaded when a request comes for it."""
    await rig.one.runtime.discovery.put(f"{instances.STARTS}1", msgspec.json.encode(start))
    await rig.until(lambda: start in rig.frontend._expected_workers._starts.values())


async def test_waiting_stream_says_how_long_it_takes(rig, monkeypatch):
    monkeypatch.setattr(waiting, "NOTICE_S", 0.0)
    await announce(rig, ON_DEMAND)
    first = rig.start_task(rig.complete(model="q", stream=True))
    waiting_ones = rig.frontend._dispatcher.worker_wait._waiting
    await rig.until(lambda: len(waiting_ones) == 1)
    second = rig.start_task(rig.complete(model="q", stream=True))
    await rig.until(lambda: len(waiting_ones) == 2)
    await asyncio.sleep(2 * waiting.PAUSE_S)
    await rig.register(Worker, "q", rig.one.name)
    texts = [(await answer).text for answer in (first, second)]

    assert texts[0].startswith(': "q" is being loaded: about 12 s, number 1 in the queue\n\n')
    assert texts[1].startswith(': "q" is being loaded: about 12 s, number 2 in the queue\n\n')
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)


async def test_query_for_the_worker_is_answered_after_its_model_was_waited_for(rig, monkeypatch):
    monkeypatch.setattr(waiting, "NOTICE_S", 0.0)
    await announce(rig, ON_DEMAND)
    query = {"annotations": ["query_instance_id"]}
    asked = rig.start_task(rig.complete(model="q", stream=True, nvext=query))
    await rig.until(lambda: rig.frontend._dispatcher.worker_wait._waiting)
    await asyncio.sleep(2 * waiting.PAUSE_S)
    worker = await rig.register(Worker, "q", rig.one.name)
    text = (await asked).text

    assert text.startswith(': "q" is being loaded: about 12 s, number 1 in the queue\n\n')
    assert f'event: worker_instance_id\n: "{worker.instance.instance_id}"\n\n' in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/api/generate", {}),
        ("/api/generate", {"keep_alive": 0}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
async def test_key_has_no_model_loaded_that_it_may_not_ask(bare, tmp_path, path, body):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "alice"\nkey = "sk-alice-1"\nmodels = ["m"]\n')
    await bare.start(api_keys_file=str(keys))
    bare.one = await bare.worker()
    await announce(bare, ON_DEMAND)
    headers = {"authorization": "Bearer sk-alice-1"}
    refused = await bare.client.post(path, json={"model": "q", **body}, headers=headers)

    assert (refused.status_code, bare.frontend._dispatcher.worker_wait._waiting) == (404, {})


async def test_model_on_demand_is_listed_before_it_is_loaded(rig):
    await announce(rig, ON_DEMAND)
    listed = (await rig.client.get("/v1/models")).json()["data"]

    assert [(row["id"], row["num_workers"], row["max_model_len"]) for row in listed] == [
        ("m", 1, 200),
        ("q", 0, 99),
    ]


NAMES = {"aliases": ("mine",), "lora_names": ("poet",)}


@pytest.fixture
async def sleeping(bare):
    """A frontend, and the model m, whose last worker has gone, and which is loaded when a request comes for it."""
    await bare.start(worker_wait_secs=0)
    bare.one = await bare.worker("m", **NAMES)
    await bare.one.runtime.records.withdraw()
    await bare.until(lambda: bare.frontend.models.get("m") is None)
    await announce(bare, msgspec.structs.replace(ON_DEMAND, model="m"))
    return bare


@pytest.mark.parametrize("name", ["mine", "poet"])
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"})]
)
async def test_request_by_an_alias_or_an_adapter_wakes_the_model(sleeping, path, fields, name):
    answer = sleeping.start_task(sleeping.client.post(path, json={"model": name, **fields}))
    label = 'dynamo_frontend_requests_waiting_for_worker{model="m"}'
    await sleeping.until(
        lambda: sleeping.frontend._dispatcher.worker_wait._waiting or answer.done()
    )
    num_waiting = (await sleeping.metrics()).get(label)
    await sleeping.register(Worker, "m", sleeping.one.name, **NAMES)

    assert (await answer).status_code == 200
    assert num_waiting == 1


@pytest.mark.parametrize("name", ["m", "mine", "poet"])
async def test_request_to_unload_a_model_does_not_wake_it(sleeping, name):
    body = {"model": name, "keep_alive": 0}
    answer = sleeping.start_task(sleeping.client.post("/api/generate", json=body))
    await sleeping.until(
        lambda: sleeping.frontend._dispatcher.worker_wait._waiting or answer.done()
    )

    assert sleeping.frontend._dispatcher.worker_wait._waiting == {}
    assert (await answer).status_code == 200


def asleep(model, role):
    sleeper = instances.SleepingInstance(instance_id=7, role=role, endpoint="dyn://a.b.c")
    return instances.WorkerStart(model=model, namespace="", estimate_s=9.0, sleeper=sleeper)


async def test_metric_shows_the_models_that_lack_workers_on_purpose(rig):
    of_planner = instances.WorkerStart(model="P", namespace="", estimate_s=9.0, context_length=0)
    starts = [
        *(ON_DEMAND, of_planner, asleep("s", "decode"), asleep("t", "prefill")),
        msgspec.structs.replace(ON_DEMAND, model="f", failure="it has no weights"),
        instances.WorkerStart(model="crashed, starts anew", namespace="", estimate_s=9.0),
    ]
    for number, start in enumerate(starts):
        key = f"{instances.STARTS}{number:x}"
        await rig.one.runtime.discovery.put(key, msgspec.json.encode(start))
    expected = rig.frontend._expected_workers
    await rig.until(lambda: len(expected._starts) == len(starts))
    shown = await wakeable(rig)
    for number in range(2):
        await rig.one.runtime.discovery.delete(f"{instances.STARTS}{number:x}")
    await rig.until(lambda: len(expected._starts) == len(starts) - 2)

    assert shown == {"q": 1, "p": 1, "s": 1}
    assert await wakeable(rig) == {"s": 1}


@pytest.mark.parametrize("path", ["/health", "/v2/health/ready"])
@pytest.mark.parametrize("start", [ON_DEMAND, asleep("q", "decode")], ids=["on demand", "asleep"])
async def test_frontend_without_workers_is_healthy_while_a_request_wakes_a_model(bare, start, path):
    async def check_health():
        return (await bare.client.get(path)).status_code

    await bare.start()
    bare.one = await bare.worker("m")
    await bare.one.runtime.records.withdraw()
    await bare.until(lambda: bare.frontend.models.get("m") is None)
    found = [await check_health()]
    for announced in (start, msgspec.structs.replace(start, failure="it has no weights")):
        await announce(bare, announced)
        found.append(await check_health())

    assert found == [503, 200, 503]


async def wakeable(rig):
    """The values of the metric by model."""
    name, counted = "dynamo_frontend_model_wakeable", await rig.metrics()
    return {row.split('"')[1]: value for row, value in counted.items() if row.startswith(name)}


async def test_model_on_demand_is_shown_before_it_is_loaded(rig):
    await announce(rig, ON_DEMAND)
    model = (await rig.client.get("/v1/models/q")).json()
    tags, running = [
        [row["name"] for row in (await rig.client.get(path)).json()["models"]]
        for path in ("/api/tags", "/api/ps")
    ]
    facts = (await rig.client.post("/api/show", json={"model": "q"})).json()

    assert (model["id"], model["num_workers"], model["max_model_len"]) == ("q", 0, 99)
    assert (tags, running) == (["m", "q"], ["m"])
    assert (facts["model_info"]["dynamo.context_length"], facts["capabilities"]) == (99, [])


async def test_request_of_ollama_without_a_prompt_loads_a_model_on_demand(rig):
    await announce(rig, ON_DEMAND)
    response = rig.start_task(rig.client.post("/api/generate", json={"model": "q"}))
    await rig.until(lambda: rig.frontend._dispatcher.worker_wait._waiting)
    await rig.register(Worker, "q", rig.one.name)
    answer = await response

    assert (answer.status_code, answer.json()["done_reason"]) == (200, "load")


async def test_model_on_demand_is_not_loaded_to_be_unloaded(rig):
    await announce(rig, ON_DEMAND)
    answer = await rig.client.post("/api/generate", json={"model": "q", "keep_alive": 0})

    assert (answer.status_code, answer.json()["done_reason"]) == (200, "unload")
    assert not rig.frontend._dispatcher.worker_wait._waiting


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ],
)
async def test_tokens_are_counted_once_a_model_on_demand_is_loaded(rig, path, fields):
    await announce(rig, ON_DEMAND)
    response = rig.start_task(rig.client.post(path, json={"model": "q", **fields}))
    await rig.until(lambda: rig.frontend._dispatcher.worker_wait._waiting)
    await rig.register(Worker, "q", rig.one.name)

    assert (await response).status_code == 200


async def test_model_that_could_not_be_loaded_is_refused_with_the_reason(impatient):
    await announce(impatient, msgspec.structs.replace(ON_DEMAND, failure="it has no weights"))
    answer = await impatient.complete(model="q", stream=True)

    assert answer.status_code == 503
    assert "'q' could not be loaded: it has no weights" in answer.json()["error"]["message"]


async def test_request_waits_as_long_as_its_model_is_promised():
    clock, expected = clocks.VirtualClock(), Expected()
    expected.estimate_start = lambda model, waited_s=0.0: waited_s + 10.0
    asked = Asked(clock, expected)
    waits = asked.begin()
    await clock.advance(1000)
    still_waits = not waits.done()
    asked.error = None
    await clock.advance(waiting.PAUSE_S)

    assert still_waits
    assert await waits == "answer"
