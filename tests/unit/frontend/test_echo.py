"""Completions that begin with their prompt, as evaluators ask for them."""

import msgspec
import pytest
from frontend_rig import EOS, events, outputs

from dynamo.frontend.apis import completions
from dynamo.protocols import generate, model_card


def scored(call, request):
    """An engine that tells of the prompt: each token is as likely as it is high, its rival is the token 33."""
    num = request.output_options.prompt_logprobs
    prompt = memoryview(request.token_ids).cast("I").tolist()
    rival = (generate.TopLogprob(33, -0.5),) if num else ()
    told = None
    if num is not None:
        told = tuple(generate.TokenLogprobs(-float(token), rival) for token in prompt[1:])
    for index in range(request.sampling_options.n):
        for number, output in enumerate(outputs("xy", index=index)):
            call.send(
                generate.Output(
                    output.token_ids,
                    output.finish_reason,
                    index=index,
                    logprobs=(generate.TokenLogprobs(-1.0),),
                    prompt_logprobs=told if number == index == 0 else None,
                )
            )
    call.finish()


def one_token(call, request):
    """The same, but it ends after its first token, as with max_tokens 1."""
    num = request.output_options.prompt_logprobs
    told = (generate.TokenLogprobs(-2.0),) * (request.prompt_len - 1)
    call.send(
        generate.Output(
            (120,),
            generate.FinishReason.LENGTH,
            logprobs=None if num is None else (generate.TokenLogprobs(-1.0),),
            prompt_logprobs=None if num is None else told,
        )
    )
    call.finish()


def end_token(call, request):
    """The same, but its first token is the one that ends the text."""
    told = (generate.TokenLogprobs(-2.0),) * (request.prompt_len - 1)
    ending = generate.Output(
        (EOS,),
        generate.FinishReason.EOS,
        logprobs=(generate.TokenLogprobs(-0.25),),
        prompt_logprobs=told,
    )
    call.send(ending)
    call.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_end_token_has_a_log_probability_behind_the_prompt(rig, stream):
    rig.one.script = end_token
    answer = await rig.complete([97, 98], echo=True, logprobs=1, max_tokens=1, stream=stream)
    choice = (events(answer.text)[0] if stream else answer.json())["choices"][0]

    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b", "<end>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


async def test_echoed_prompt_has_logprobs(rig):
    rig.one.script = scored
    body = (await rig.complete("ab", echo=True, logprobs=1)).json()
    (choice,) = body["choices"]

    assert choice["text"] == "abxy"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "x", "y"],
        "token_logprobs": [None, -98.0, -1.0, -1.0],
        "top_logprobs": [None, {"!": -0.5, "b": -98.0}, {"x": -1.0}, {"y": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }
    assert body["usage"]["completion_tokens"] == 2
    assert msgspec.convert(body, completions.Completion)  # it is as described


async def test_text_is_scored_without_generating_tokens(rig):
    rig.one.script = one_token
    body = (await rig.complete("abc", echo=True, logprobs=0, max_tokens=0)).json()
    (choice,) = body["choices"]

    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -2.0}, {"c": -2.0}]
    assert body["usage"]["completion_tokens"] == 0
    assert rig.one.requests[0].stop_conditions.max_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_scored_text_has_no_token_that_was_not_generated(rig, stream):
    rig.one.script = one_token
    answer = await rig.complete(
        "abc", echo=True, max_tokens=0, return_token_ids=True, stream=stream
    )
    bodies = events(answer.text)[:-1] if stream else [answer.json()]

    assert [choice["token_ids"] for body in bodies for choice in body["choices"]] in (
        [[]],
        [[], []],
    )
    assert bodies[0]["choices"][0]["prompt_token_ids"] == [97, 98, 99]


async def test_prompt_is_echoed_unchanged_without_logprobs(rig):
    rig.one.script = one_token
    body = (await rig.complete("abc", echo=True, max_tokens=0)).json()

    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"] is None
    assert rig.one.requests[0].output_options == generate.OutputOptions()


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
async def test_each_choice_echoes_its_own_prompt_with_logprobs(rig, prompt):
    rig.one.script = scored
    body = (await rig.complete(prompt, n=2, echo=True, logprobs=0)).json()

    assert [choice["text"] for choice in body["choices"]] == ["abxy", "abxy", "cdxy", "cdxy"]
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [
        *[[None, -98.0, -1.0, -1.0]] * 2,
        *[[None, -100.0, -1.0, -1.0]] * 2,
    ]


async def test_echo_of_token_ids_includes_special_tokens(rig):
    rig.one.script = one_token
    body = (await rig.complete([256, 97], echo=True, logprobs=0, max_tokens=0)).json()
    (choice,) = body["choices"]

    assert choice["text"] == "<end>a"
    assert choice["logprobs"]["text_offset"] == [0, 5]


async def test_first_chunk_of_a_stream_echoes_the_prompt_with_logprobs(rig):
    rig.one.script = scored
    answer = await rig.complete("ab", echo=True, logprobs=0, stream=True)
    chunks = [event["choices"][0] for event in events(answer.text) if event != "[DONE]"]

    assert [chunk["text"] for chunk in chunks] == ["abx", "y", ""]
    assert chunks[0]["logprobs"]["token_logprobs"] == [None, -98.0, -1.0]
    assert chunks[1]["logprobs"]["text_offset"] == [3]


async def test_prompt_logprobs_are_refused_if_the_engine_has_none(rig):
    blind = model_card.ModelRuntimeConfig(supports_prompt_logprobs=False)
    await rig.worker("blind", runtime_config=blind)
    answer = await rig.client.post(
        "/v1/completions",
        json={"model": "blind", "prompt": "x", "echo": True, "logprobs": 0},
    )

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"
