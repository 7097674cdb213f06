"""A worker is lost during an answer: the client sees the same answer, whatever it requested."""

import asyncio
import json
import re
import shutil

import httpx
import pytest
from frontend_rig import EOS, events
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend.delivery import choices
from dynamo.frontend.model_registry import registered_model
from dynamo.protocols import generate, model_card
from waiting import PATIENT_S, until

CALL = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASKED = {
    "plain": {},
    "limited": {"max_tokens": 11},
    "stop strings": {"stop": ["lazy"]},
    "a stop string cut in two": {"stop": ["jumps over"], "max_tokens": 40},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 12},
    "choices": {"n": 3, "max_tokens": 9},
    "choices that stop": {"n": 2, "stop": ["fox", "dog"], "logprobs": True},
    "tools": {"tools": TOOLS, "model": "p"},
    "usage as it goes": {"max_tokens": 8},
}
SAYS = "The quick brown fox jumps over the lazy dog."
GONE = errors.StreamBroken("worker at x closed the connection")


class Speaker:
    """An engine that says one text, choice by choice; it is lost when it has said `cut` tokens."""

    def __init__(self, text=SAYS, cuts=()):
        self.text = text
        self.cuts = list(cuts)  # of each life; then it lives
        self.error = GONE

    def __call__(self, call, request):
        left = self.cuts.pop(0) if self.cuts else None
        open_choices = [self.outputs(request, index) for index in range(request.sampling_options.n)]
        while open_choices:  # a token each, as engines do
            for one in list(open_choices):
                if left == 0:
                    call.fail(self.error)
                    return
                output = next(one)
                call.send(output)
                left = None if left is None else left - 1
                if output.finish_reason is not None:
                    open_choices.remove(one)
        call.finish()

    def outputs(self, request, index):
        number = request.first_choice + index
        said = [*(" " * number + self.text).encode(), EOS]
        limit = request.stop_conditions.max_tokens
        rest = said[request.num_resumed :][:limit]
        for at, token in enumerate(rest):
            reason = generate.FinishReason.EOS if token == EOS else None
            if reason is None and at == limit - 1:
                reason = generate.FinishReason.LENGTH
            yield generate.Output(
                (token,),
                reason,
                index=index,
                logprobs=self.logprobs(request, token),
                cached_tokens=3 if at == index == 0 else None,
            )

    def logprobs(self, request, token):
        if request.output_options.logprobs is None:
            return None
        return (generate.TokenLogprobs(-token / 100, (generate.TopLogprob(token, -token / 100),)),)


def told(answer):
    """What the client sees, without what differs between any two answers."""
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', answer.text)
    return by_choice(events(text)) if answer.text.startswith("data: ") else json.loads(text)


def by_choice(found):
    """Choices that move become faster or slower than others: their order says nothing."""
    last = [9]  # what is of no choice
    return sorted(found, key=lambda one: last if one == "[DONE]" else places(one) or last)


def places(event):
    return [choice["index"] for choice in event["choices"]]


@pytest.fixture
async def workers(rig):
    rig.two = await rig.worker()
    facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="basic")
    for worker in (rig.one, rig.two):
        worker.script = Speaker()
    rig.three = await rig.worker("p", runtime_config=facts)
    rig.four = await rig.worker("p", runtime_config=facts)
    rig.three.script = rig.four.script = Speaker(CALL)
    return rig


def fail_after(rig, *cuts, error=GONE):
    """Whoever gets the next request, and the next, is lost after so many tokens."""
    plain, calling = Speaker(SAYS, cuts), Speaker(CALL, cuts)
    plain.error = calling.error = error
    rig.one.script = rig.two.script = plain
    rig.three.script = rig.four.script = calling


def fields(way, is_stream):
    asked = dict(ASKED[way])
    if is_stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        if way == "usage as it goes":
            asked["stream_options"]["continuous_usage_stats"] = True
    return asked


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("way", ASKED)
@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, 30), min_size=1, max_size=3))
async def test_migrated_answer_equals_the_undisturbed_one(workers, way, is_stream, cuts):
    asked = fields(way, is_stream)
    fail_after(workers)
    undisturbed = told(await workers.chat(**asked))
    fail_after(workers, *cuts)

    assert told(await workers.chat(**asked)) == undisturbed


async def test_usage_counts_the_original_prompt_and_the_first_workers_cache(workers):
    fail_after(workers, 5, 5)
    usage = (await workers.chat("hi")).json()["usage"]

    assert usage["prompt_tokens"] == len("user: hi\n")
    assert usage["completion_tokens"] == len(SAYS) + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


async def test_other_worker_receives_prompt_and_generated_tokens(workers):
    fail_after(workers, 4)
    await workers.chat("hi", max_tokens=10, min_tokens=6, seed=3)
    (first,), (second,) = workers.one.requests, workers.two.requests
    first, second = sorted((first, second), key=lambda request: request.num_resumed)

    assert second.token_ids == first.token_ids + b"".join(
        token.to_bytes(4, "little") for token in SAYS[:4].encode()
    )
    assert (second.num_resumed, second.first_choice) == (4, 0)
    assert second.stop_conditions.max_tokens == 6
    assert second.stop_conditions.min_tokens == 2
    assert second.sampling_options.seed == 3


async def test_answer_that_has_begun_does_not_go_to_a_worker_with_other_weights(rig):
    rig.first = await rig.worker("w", weights="1")
    rig.second = await rig.worker("w", weights="2")
    rig.first.script = rig.second.script = Speaker(cuts=[4])
    answers = asyncio.create_task(rig.chat(model="w"))
    await rig.until(lambda: rig.first.requests or rig.second.requests)
    third = await rig.worker("w", weights="2" if rig.second.requests else "1")
    third.script = rig.first.script
    answer = await answers

    assert answer.json()["choices"][0]["message"]["content"] == SAYS
    other = rig.first if rig.second.requests else rig.second
    assert not other.requests


async def test_unstarted_request_goes_to_a_worker_with_other_weights(rig):
    first, second = [await rig.worker("w", weights=weights) for weights in "12"]
    first.script = second.script = Speaker(cuts=[0])

    answer = await rig.chat(model="w")

    assert answer.json()["choices"][0]["message"]["content"] == SAYS
    assert len(first.requests) == len(second.requests) == 1


async def test_unstarted_request_is_sent_again_unchanged(workers):
    fail_after(workers, 0)
    await workers.chat(n=2)
    (first,), (second,) = workers.one.requests, workers.two.requests

    assert first == second


async def test_lost_prompt_is_looked_at_without_those_of_the_others(workers, monkeypatch):
    prompts = [f"{number} " for number in range(64)]
    speak, num_looks, lost_prompts = Speaker(), 0, set()

    def lose_once(call, request):
        if request.token_ids in lost_prompts:
            speak(call, request)
        else:
            lost_prompts.add(request.token_ids)
            call.fail(GONE)

    def look(choice):
        nonlocal num_looks
        num_looks += 1
        return choice.finish_reason is not None

    workers.one.script = workers.two.script = lose_once
    monkeypatch.setattr(choices.Choice, "is_over", property(look))
    answer = await workers.complete(prompts, max_tokens=1)

    assert len(answer.json()["choices"]) == len(lost_prompts) == len(prompts)
    assert num_looks <= 4 * len(prompts)


async def test_only_open_choices_migrate(workers):
    class OneEnds(Speaker):
        def outputs(self, request, index):
            if request.first_choice + index == 1:
                yield generate.Output(tuple(b"no"), generate.FinishReason.LENGTH, index=index)
            else:
                yield from super().outputs(request, index)

    workers.one.script = workers.two.script = OneEnds(cuts=[7])
    choices = (await workers.chat(n=3)).json()["choices"]
    moved = [one for one in workers.one.requests + workers.two.requests if one.num_resumed]

    assert [one["message"]["content"] for one in choices] == [SAYS, "no", "  " + SAYS]
    assert sorted(one.first_choice for one in moved) == [0, 2]


async def test_prompts_migrate_independently(workers):
    fail_after(workers, 3, 5)
    answer = await workers.complete(["a", "b"], max_tokens=20)

    assert [one["text"] for one in answer.json()["choices"]] == [SAYS[:20]] * 2
    assert answer.json()["usage"]["prompt_tokens"] == 2


async def test_echo_and_prompt_logprobs_are_sent_once(workers):
    fail_after(workers, 3)
    answer = await workers.complete("ab", max_tokens=10, echo=True)

    assert answer.json()["choices"][0]["text"] == "ab" + SAYS[:10]


async def test_worker_lost_after_the_last_token_ends_the_answer(workers):
    class SilentEnd(Speaker):
        def outputs(self, request, index):
            for output in super().outputs(request, index):
                yield generate.Output(output.token_ids, index=index)

    workers.one.script = workers.two.script = SilentEnd(cuts=[5])
    choice = (await workers.chat(max_tokens=5)).json()["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == (SAYS[:5], "length")
    assert len(workers.one.requests + workers.two.requests) == 1


async def test_exhausted_migration_limit_ends_the_answer(workers, caplog):
    fail_after(workers, 2, 2, 2, 2)
    found = events((await workers.chat(stream=True)).text)

    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found[:-1]) == SAYS[:8]
    assert found[-1]["error"]["code"] == "stream_broken"
    assert caplog.text.count("Stream disconnected... recreating stream...") == 3
    assert "Migration limit exhausted" in caplog.text


async def test_no_request_migrates_with_a_limit_of_zero(bare):
    await bare.start(migration_limit=0)
    for _ in range(2):
        (await bare.worker()).script = Speaker(cuts=[0])
    refused = await bare.chat()

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "stream_broken"


async def test_card_lowers_the_migration_limit(bare):
    await bare.start()
    for _ in range(2):
        (await bare.worker(migration_limit=0)).script = Speaker(cuts=[0])

    assert (await bare.chat()).status_code == 503
    assert (await bare.metrics())['dynamo_frontend_model_migration_limit{model="m"}'] == 0


async def test_too_long_answer_ends_with_its_worker(bare):
    await bare.start(migration_max_seq_len=len("user: hi\n") + 4)
    one, two = await bare.worker(), await bare.worker()
    one.script = two.script = Speaker(cuts=[4])
    moved = await bare.chat("hi")
    one.script = two.script = Speaker(cuts=[5])
    refused = await bare.chat("hi")
    counted = await bare.metrics()

    assert (moved.status_code, refused.status_code) == (200, 503)
    assert counted['dynamo_frontend_model_migration_max_seq_len_exceeded_total{model="m"}'] == 1


async def test_migrations_are_counted_by_type(workers):
    fail_after(workers, 0, 3)
    await workers.chat()
    counted = await workers.metrics()
    name = 'dynamo_frontend_model_migration_total{migration_type="%s_request",model="m"}'

    assert [counted[name % kind] for kind in ("new", "ongoing")] == [1, 1]
    assert counted['dynamo_frontend_model_migration_duration_seconds_count{model="m"}'] == 2


@pytest.mark.parametrize(
    "error", [errors.EngineFailed("out of memory"), errors.InvalidRequest("no"), errors.Overloaded("full")]
)  # fmt: skip
async def test_other_errors_are_reported_without_migration(workers, error):
    fail_after(workers, 3, error=error)
    answer = await workers.chat()

    assert answer.json()["error"]["code"] == error.code
    assert len(workers.one.requests + workers.two.requests) == 1


async def test_migrated_request_survives_a_full_worker(workers):
    speaker = Speaker(cuts=[3, 0])

    def script(call, request):
        speaker.error = errors.Overloaded("full") if request.num_resumed else GONE
        speaker(call, request)

    workers.one.script = workers.two.script = script

    assert (await workers.chat()).json()["choices"][0]["message"]["content"] == SAYS


async def test_new_request_that_a_full_worker_refuses_goes_to_another(workers):
    fail_after(workers, 0, error=errors.Overloaded("full"))
    answer = await workers.chat()

    assert answer.json()["choices"][0]["message"]["content"] == SAYS
    assert [len(worker.requests) for worker in (workers.one, workers.two)] == [1, 1]


async def test_request_that_all_workers_refuse_is_told_when_to_try_again(workers):
    fail_after(workers, *[0] * 9, error=errors.Overloaded("full", retry_after_s=7))
    answer = await workers.chat()

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert {len(worker.requests) for worker in (workers.one, workers.two)} == {2}


async def test_request_for_one_instance_does_not_migrate(workers):
    workers.one.script = Speaker(cuts=[3])
    header = {"x-worker-instance-id": str(workers.one.instance.instance_id)}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = await workers.client.post("/v1/chat/completions", json=body, headers=header)

    assert answer.json()["error"]["code"] == "stream_broken"
    assert not workers.two.requests


def leave_after(rig, worker, num_tokens):
    """The worker leaves with its next request, of which it has said so much."""

    async def leave(call):
        await worker.runtime.records.deregister()
        await rig.until(lambda: not rig.instances)
        call.fail(errors.WorkerLost("the worker stops"))

    def script(call, request):
        for token in SAYS[:num_tokens].encode():
            call.send(generate.Output((token,)))
        rig.start_task(leave(call))

    worker.script = script


async def test_migrating_request_waits_for_a_worker(rig, caplog):
    leave_after(rig, rig.one, 6)
    answer = rig.start_task(rig.chat())
    await rig.until(lambda: "recreating stream" in caplog.text)
    replacement = await rig.worker()
    replacement.script = Speaker()

    assert (await answer).json()["choices"][0]["message"]["content"] == SAYS


async def test_migrating_request_fails_after_the_wait_limit(bare):
    await bare.start(worker_wait_secs=0.3)
    leave_after(bare, await bare.worker(), 1)
    found = events((await bare.chat(stream=True)).text)

    assert found[0]["choices"][0]["delta"]["content"] == SAYS[0]
    assert found[-1]["error"]["code"] == "no_workers"


async def test_wait_for_a_worker_ends_with_the_time_of_the_request(bare):
    await bare.start(request_timeout_secs=0.5, worker_wait_secs=60)
    leave_after(bare, await bare.worker(), 1)
    found = events((await bare.chat(stream=True)).text)

    assert found[-1]["error"]["code"] == "deadline_exceeded"


async def test_migration_fails_if_the_model_has_changed(bare, tmp_path, caplog):
    await bare.start(worker_wait_secs=5)  # the other model has to be there when the wait is over
    leave_after(bare, await bare.worker(), 3)
    answer = bare.start_task(bare.chat())
    await bare.until(lambda: "recreating stream" in caplog.text)
    bare.model_dir = shutil.copytree(bare.model_dir, tmp_path / "other")
    (bare.model_dir / "generation_config.json").write_text("{}")
    other = await bare.worker()

    assert "another one by now" in (await answer).json()["error"]["message"]
    assert not other.requests


async def test_client_that_disconnects_during_migration_leaves_nothing_running(rig, caplog):
    leave_after(rig, rig.one, 6)
    async with httpx.AsyncClient(base_url=rig.frontend.url, timeout=PATIENT_S) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body):
            await rig.until(lambda: "recreating stream" in caplog.text)

    async def is_over():
        return (await rig.metrics())['dynamo_frontend_inflight_requests{model="m"}'] == 0

    await until(is_over)
    replacement = (
        await rig.worker()
    )  # only now: before, the frontend may not know that the client left
    await rig.chat()
    assert len(replacement.requests) == 1


DIED = errors.WorkerDied("worker at x closed the connection")


async def test_request_with_which_two_workers_died_goes_to_no_third(workers):
    third = await workers.worker()
    third.script = Speaker()
    fail_after(workers, 5, 5, error=DIED)
    third.script = workers.one.script
    answer = await workers.chat()

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "suspect_request"
    assert answer.headers["x-should-retry"] == "false"  # official clients repeat a 500 otherwise
    assert "2 workers died while they had this request" in answer.json()["error"]["message"]
    assert sum(len(each.requests) for each in (workers.one, workers.two, third)) == 2


async def test_request_whose_worker_died_while_it_compiled_its_grammar_does_not_migrate(workers):
    facts = model_card.ModelRuntimeConfig(supports_guided=True)
    guiding = [await workers.worker("g", runtime_config=facts) for _ in range(2)]
    for worker in guiding:
        worker.script = Speaker(SAYS, [0])
        worker.script.error = DIED
    answer = await workers.chat(model="g", response_format={"type": "json_object"})

    assert answer.status_code == 500
    assert "died while it prepared this request" in answer.json()["error"]["message"]
    assert sum(len(worker.requests) for worker in guiding) == 1


async def test_request_migrates_from_a_worker_that_died_with_tokens_of_it(workers):
    fail_after(workers, 5, error=DIED)
    answer = await workers.chat()

    assert answer.json()["choices"][0]["message"]["content"] == SAYS


async def test_stream_ends_with_an_error_if_the_task_that_migrates_it_dies(workers, monkeypatch):
    fail_after(workers, 3)
    open_stream = registered_model.RegisteredModel.open_stream

    async def open_once(self, request, *args, **options):
        if request.num_resumed:
            raise OSError("Bad file descriptor")
        return await open_stream(self, request, *args, **options)

    monkeypatch.setattr(registered_model.RegisteredModel, "open_stream", open_once)
    answer = await workers.chat(stream=True)

    assert "an internal error lost the answer" in events(answer.text)[-1]["error"]["message"]


async def test_migration_is_explained_between_the_choices_of_both_workers(workers):
    fail_after(workers, 5)
    answer = await workers.chat(max_tokens=9, nvext={"extra_fields": ["explanation"]})
    first, moved, second = answer.json()["nvext"]["explanation"]

    assert (first["policy"], second["policy"]) == ("round-robin", "round-robin")
    assert (moved["kind"], moved["outcome"]) == ("migration", "migrate")
    assert re.fullmatch(
        r"instance [0-9a-f]+ was lost \(stream_broken\) after 5 tokens; migrations before: 0 \(at most 3\)",
        moved["reason"],
    )
