"""Answers in one body."""

import asyncio

import pytest
from frontend_rig import events, outputs

from dynamo.base import errors
from dynamo.protocols import generate


def report(logprob, *top):
    return (generate.TokenLogprobs(logprob, tuple(generate.TopLogprob(*one) for one in top)),)


async def test_whole_chat_response_has_all_fields(rig):
    rig.one.script = outputs("hello", "eos")
    answer = await rig.chat("hi")
    body = answer.json()

    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "m",
        "service_tier": "default",
        "system_fingerprint": body["system_fingerprint"],
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "hello",
                    "reasoning_content": None,
                    "refusal": None,
                    "tool_calls": [],
                    "annotations": [],
                    "audio": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 6,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert rig.one.prompts == ["user: hi\n"]


async def test_whole_completion_has_all_fields(rig):
    rig.one.script = outputs("ab")
    body = (await rig.complete("once")).json()

    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}
    ]
    assert rig.one.prompts == ["once"]


async def test_stop_string_is_cut_from_the_answer(rig):
    rig.one.script = [generate.Output(tuple(b"one END two"))]
    body = (await rig.chat(stop="END")).json()
    await rig.until(lambda: rig.one.num_cancelled == 1)

    assert body["choices"][0]["message"]["content"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
@pytest.mark.parametrize(("finish", "token"), [("stop", 7), ("eos", None), ("length", None)])
async def test_choice_names_the_stop_token_that_ended_it_as_vllms_does(rig, fields, finish, token):
    rig.one.script = [
        generate.Output((104,), logprobs=report(-0.25)),
        generate.Output(
            (7,), generate.FinishReason(finish), stop_reason=token, logprobs=report(-0.5)
        ),
    ]
    whole = (await rig.complete(**fields)).json()["choices"][0]
    streamed = events((await rig.complete(stream=True, **fields)).text)[:-1]

    assert whole.get("stop_reason") == token
    assert streamed[-1]["choices"][0].get("stop_reason") == token
    assert not any("stop_reason" in event["choices"][0] for event in streamed[:-1])


async def test_prompts_times_choices_are_numbered_through(rig):
    def script(call, request):
        for index in range(2):
            for output in outputs(f"{chr(request.token_ids[0])}{index}", index=index):
                call.send(output)
        call.finish()

    rig.one.script = script
    body = (await rig.complete(prompt=["p", "q", "r"], n=2)).json()

    assert [(one["index"], one["text"]) for one in body["choices"]] == [
        (0, "p0"), (1, "p1"), (2, "q0"), (3, "q1"), (4, "r0"), (5, "r1"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12


async def test_echo_of_a_prompt_of_tokens_is_its_text(rig):
    rig.one.script = outputs("!")
    body = (await rig.complete(prompt=[104, 105], echo=True)).json()

    assert body["choices"][0]["text"] == "hi!"


async def test_completion_logprobs_have_openais_four_lists(rig):
    rig.one.script = [
        generate.Output((104,), logprobs=report(-0.25, (104, -0.25), (105, -1.5))),
        generate.Output((105,), generate.FinishReason.LENGTH, logprobs=report(-0.75, (105, -0.75))),
    ]
    body = (await rig.complete(logprobs=2)).json()

    assert body["choices"][0]["logprobs"] == {
        "tokens": ["h", "i"],
        "token_logprobs": [-0.25, -0.75],
        "top_logprobs": [{"h": -0.25, "i": -1.5}, {"i": -0.75}],
        "text_offset": [0, 1],
    }


async def test_tokens_of_a_stop_string_are_not_reported(rig):
    rig.one.script = [
        generate.Output((ord(char),), logprobs=report(-float(at)))
        for at, char in enumerate("abENDc", 1)
    ]
    body = (await rig.chat(stop="END", logprobs=True)).json()
    told = body["choices"][0]["logprobs"]["content"]

    assert [one["token"] for one in told] == ["a", "b"]


async def test_engine_failure_is_a_500_with_its_message(rig):
    rig.one.script = lambda call, _: call.fail(errors.EngineFailed("it broke"))
    answer = await rig.chat()

    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "it broke"


async def test_worker_that_vanishes_is_a_503(rig):
    def script(call, _):
        call._connection.frames.drop("was killed")

    rig.one.script = script
    answer = await rig.chat()

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_died"


async def test_disconnected_client_of_a_whole_answer_cancels_the_worker(rig):
    rig.one.script = lambda call, _: None
    asking = rig.client.build_request("POST", "/v1/completions", json={"model": "m", "prompt": "x"})
    waiting = rig.start_task(rig.client.send(asking))
    await rig.until(lambda: rig.one.calls)
    waiting.cancel()
    await rig.until(lambda: rig.one.num_cancelled == 1)

    assert (await rig.metrics())["dynamo_frontend_disconnected_clients"] == 1


async def test_wait_that_a_route_begins_after_the_client_has_gone_ends_at_once(rig):
    (replicas,) = rig.frontend.models.get("m").replicas.values()
    asked, wait, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class SlowRoute:
        async def open_stream(self, request, receiver, options):
            asked.set()
            await wait.wait()  # for a worker that is lost, for example
            options.add_disconnect_callback(ended.set)
            await ended.wait()
            raise errors.Cancelled("the client went away")

    replicas.route = SlowRoute()
    asking = rig.start_task(rig.complete("x"))
    await asked.wait()
    asking.cancel()
    await rig.until(lambda: not rig.frontend._metrics.open_requests)
    wait.set()
    await rig.until(ended.is_set)


async def test_answer_over_the_time_limit_is_a_504(bare):
    await bare.start(request_timeout_secs=0.5)
    worker = await bare.worker()
    worker.script = lambda call, _: None  # takes it, and never answers
    answer = await bare.chat()

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert worker.num_cancelled == 1


async def test_choice_ended_by_the_frontend_is_cancelled_at_the_engine(rig):
    rig.one.script = outputs("aXbb", None, 1)
    asked = rig.start_task(rig.complete(prompt=["p", "q"], n=2, stop="X"))
    await rig.until(lambda: rig.one.cancelled_choices == [1, 1])
    for call in rig.one.calls:
        for output in outputs("cc"):
            call.send(output)
    body = (await asked).json()
    await rig.until(lambda: rig.one.num_cancelled == 2)

    assert [choice["text"] for choice in body["choices"]] == ["cc", "a", "cc", "a"]
