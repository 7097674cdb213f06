"""What vLLM's clients ask for of tokens: their ids, the log probabilities of the prompt, and the echo of a chat."""

import pytest
from frontend_rig import EOS, events, outputs

from dynamo.protocols import generate, model_card

PROMPT = b"user: hi\n"


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
