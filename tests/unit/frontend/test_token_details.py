"""What vLLM's clients ask for of tokens: their ids, the log probabilities of the prompt, and the echo of a chat."""

import asyncio
import threading

import pytest
from frontend_rig import EOS, events, outputs

from dynamo.frontend.delivery import delivery, sse
from dynamo.preprocess import options
from dynamo.protocols import generate, model_card
from waiting import PATIENT_S

PROMPT = b"user: hi\n"
GONE = "dynamo_frontend_disconnected_clients"
LABELS = 'endpoint="completions",error_type="",model="m",request_type="unary"'


def scored(call, request):
    """An engine that reports each token of the prompt: as likely as it is high, with the rival 33."""
    num = request.output_options.prompt_logprobs
    prompt = memoryview(request.token_ids).cast("I").tolist()
    rows = tuple(
        generate.TokenLogprobs(-float(token), (generate.TopLogprob(33, -0.5),) if num else ())
        for token in prompt[1:]
    )
    call.send(
        generate.Output(
            (120, EOS), generate.FinishReason.EOS, prompt_logprobs=rows if num is not None else None
        )
    )
    call.finish()


async def test_whole_chat_has_the_ids_of_its_tokens(rig):
    rig.one.script = outputs("xy", "eos")
    body = (await rig.chat(return_token_ids=True)).json()

    assert body["choices"][0]["token_ids"] == [*b"xy", EOS]
    assert bytes(body["prompt_token_ids"]) == PROMPT


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_each_returned_token_id_has_a_log_probability(rig, path):
    tokens = (generate.TokenLogprobs(-0.5), generate.TokenLogprobs(-1.0))
    rig.one.script = [generate.Output((120, EOS), generate.FinishReason.EOS, logprobs=tokens)]
    if path == "chat":
        answer = await rig.chat(return_token_ids=True, logprobs=True)
    else:
        answer = await rig.complete("ab", return_token_ids=True, logprobs=0)
    (choice,) = answer.json()["choices"]
    rows = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]

    assert len(rows) == len(choice["token_ids"]) == 2


async def test_whole_completion_has_the_ids_of_its_tokens(rig):
    rig.one.script = [*outputs("xy", "eos"), *outputs("z", "eos", index=1)]
    rows = (await rig.complete("ab", n=2, return_token_ids=True)).json()["choices"]

    assert [row["token_ids"] for row in rows] == [[*b"xy", EOS], [*b"z", EOS]]
    assert [row["prompt_token_ids"] for row in rows] == [[*b"ab"]] * 2


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_streamed_token_ids_are_those_of_the_whole_answer(rig, path):
    rig.one.script = outputs("xy \u00e9z", "eos")
    answer = await (rig.chat if path == "chat" else lambda **fields: rig.complete("ab", **fields))(
        return_token_ids=True, stream=True, stop="!"
    )
    found = events(answer.text)[:-1]
    heads = found if path == "chat" else [event["choices"][0] for event in found]
    ids = [token_id for event in found for token_id in event["choices"][0]["token_ids"]]

    assert ids == [*"xy \u00e9z".encode(), EOS]
    assert bytes(heads[0]["prompt_token_ids"]) == (PROMPT if path == "chat" else b"ab")
    assert not any("prompt_token_ids" in head for head in heads[1:])


async def test_log_probability_of_a_text_is_that_of_its_likeliest_token(rig):
    first, second = "\u00e9".encode()
    rivals = (generate.TopLogprob(first, -0.25), generate.TopLogprob(first + 1, -2.0))
    rig.one.script = [
        generate.Output((first,), logprobs=(generate.TokenLogprobs(-0.25, rivals),)),
        generate.Output((second,), logprobs=(generate.TokenLogprobs(-0.5, ()),)),
        *outputs("", "eos"),
    ]
    logprobs = (await rig.complete(logprobs=2)).json()["choices"][0]["logprobs"]

    assert logprobs["top_logprobs"] == [{"\ufffd": -0.25}, {"\ufffd": -0.5}]


async def test_ids_are_left_out_unless_requested(rig):
    rig.one.script = outputs("xy", "eos")
    whole = (await rig.chat()).text
    streamed = (await rig.chat(stream=True)).text

    assert "token_ids" not in whole + streamed


async def test_chat_has_the_log_probabilities_of_its_prompt(rig):
    rig.one.script = scored
    body = (await rig.chat(prompt_logprobs=1)).json()
    first, second, *_ = body["prompt_logprobs"]

    assert first is None
    assert second == {
        str(PROMPT[1]): {"logprob": -float(PROMPT[1]), "rank": None, "decoded_token": "s"},
        "33": {"logprob": -0.5, "rank": 1, "decoded_token": "!"},
    }
    assert len(body["prompt_logprobs"]) == len(PROMPT)
    assert "prompt_token_ids" not in body


async def test_completion_has_them_in_its_choices(rig):
    rig.one.script = scored
    body = (await rig.complete("ab", prompt_logprobs=0)).json()

    assert body["choices"][0]["prompt_logprobs"] == [
        None, {"98": {"logprob": -98.0, "rank": None, "decoded_token": "b"}}
    ]  # fmt: skip


async def test_log_probabilities_of_the_prompt_are_refused_by_name(rig):
    blind = model_card.ModelRuntimeConfig(supports_prompt_logprobs=False)
    await rig.worker("blind", runtime_config=blind)
    refusals = [
        await rig.chat(model="blind", prompt_logprobs=1),
        await rig.chat(prompt_logprobs=1, stream=True),
    ]

    assert [answer.status_code for answer in refusals] == [400, 400]
    assert {answer.json()["error"]["param"] for answer in refusals} == {"prompt_logprobs"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("complete", {"n": 4, "prompt_logprobs": 1}, "prompt_logprobs"),  # 4 x 3 tokens x 2
        ("complete", {"n": 3, "echo": True, "logprobs": 1}, "echo"),
        ("complete", {"n": 2, "best_of": 7, "echo": True}, "echo"),
        ("complete", {"prompt": ["abc"] * 7, "return_token_ids": True}, "return_token_ids"),
        ("chat", {"n": 9, "prompt_logprobs": 2}, "prompt_logprobs"),  # once for all choices: 9 x 3
        ("chat", {"n": 3, "stream": True, "return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_answers_that_repeat_too_much_of_their_prompts_are_refused(
    rig, monkeypatch, path, fields, param
):
    monkeypatch.setattr(options, "MAX_LOGPROBS", 20)
    ask = rig.chat if path == "chat" else rig.complete
    answer = await ask(**{"prompt": "abc"} | fields if path == "complete" else fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "expected at most 20 tokens and log probabilities" in answer.json()["error"]["message"]
    assert not rig.one.requests


async def test_many_log_probabilities_are_encoded_off_the_event_loop(rig, monkeypatch):
    rig.one.script = scored
    small = (await rig.complete("ab", prompt_logprobs=1)).json()
    threads = []
    encode = sse.encode
    monkeypatch.setattr(
        sse, "encode", lambda data: threads.append(threading.current_thread()) or encode(data)
    )
    monkeypatch.setattr(delivery, "_FEW_LOGPROBS", 1)
    large = (await rig.complete("ab", prompt_logprobs=1)).json()

    assert large["choices"] == small["choices"]
    assert threads
    assert threading.main_thread() not in threads
    assert (await rig.metrics())[
        f'dynamo_frontend_requests_total{{{LABELS},status="success"}}'
    ] == 2


async def test_client_that_leaves_while_its_answer_is_encoded_counts_as_gone(rig, monkeypatch):
    rig.one.script = scored
    may_go_on, has_begun = threading.Event(), threading.Event()
    encode = sse.encode

    def encode_slowly(data):
        has_begun.set()
        may_go_on.wait()
        return encode(data)

    monkeypatch.setattr(delivery, "_FEW_LOGPROBS", 1)
    monkeypatch.setattr(sse, "encode", encode_slowly)
    asking = rig.start_task(rig.complete("ab", prompt_logprobs=1))
    await asyncio.to_thread(has_begun.wait)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not (await rig.metrics())[GONE]  # the event loop has seen by now that it left
    may_go_on.set()
    async with asyncio.timeout(PATIENT_S):
        while not (counts := await rig.metrics())[GONE]:
            pass

    assert counts['dynamo_frontend_inflight_requests{model="m"}'] == 0


async def test_fault_while_many_log_probabilities_are_encoded_is_an_error(rig, monkeypatch):
    rig.one.script = scored
    monkeypatch.setattr(delivery, "_FEW_LOGPROBS", 1)
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    with monkeypatch.context() as patched:
        patched.setattr(sse, "prompt_fields", lambda part, text: 1 / 0)
        answer = await rig.complete("ab", prompt_logprobs=1)

    assert answer.status_code == 500
    assert "see the log" in answer.json()["error"]["message"]
    assert isinstance(faults[0]["exception"], ZeroDivisionError)


async def test_answer_with_too_many_log_probabilities_is_ended(rig, monkeypatch):
    row = generate.TokenLogprobs(-1.0, (generate.TopLogprob(120, -1.0),))
    rig.one.script = [generate.Output((120,), logprobs=(row,)) for _ in range(6)]
    monkeypatch.setattr(options, "MAX_LOGPROBS", 5)
    answer = await rig.chat(logprobs=True, top_logprobs=1)

    assert answer.status_code == 400
    assert "more than 10 log probabilities" in answer.json()["error"]["message"]
    await rig.until(lambda: rig.one.num_cancelled)


SAY = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_assistants_last_message_first(rig, stream):
    rig.one.script = outputs("xy", "eos")
    fields = {"messages": SAY, "continue_final_message": True, "add_generation_prompt": False}
    echoed = await rig.chat(**fields, echo=True, stream=stream)
    plain = await rig.chat(**fields, stream=stream)
    other = await rig.chat(echo=True, stream=stream)  # the last message is the user's

    def content(answer):
        if not stream:
            return answer.json()["choices"][0]["message"]["content"]
        deltas = [event["choices"][0]["delta"] for event in events(answer.text)[:-1]]
        return "".join(delta.get("content") or "" for delta in deltas)

    assert [content(answer) for answer in (echoed, plain, other)] == ["Wellxy", "xy", "xy"]


async def test_message_is_not_echoed_in_answers_without_bound(rig):
    messages = [SAY[0], {"role": "assistant", "content": "a" * 2**18}]
    answer = await rig.chat(messages=messages, echo=True, n=65)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "echo"
    assert "expected at most 16777216 echoed characters" in answer.json()["error"]["message"]
