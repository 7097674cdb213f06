"""Of several answers the likeliest are told."""

from frontend_rig import outputs

from dynamo.protocols import generate, model_card


def says(*texts_and_logprobs):
    """A choice for each; all its tokens are equally likely."""

    def script(call, request):
        assert request.sampling_options.n == len(texts_and_logprobs)
        for index, (text, logprob) in enumerate(texts_and_logprobs):
            for output in outputs(text, index=index):
                call.send(
                    generate.Output(
                        output.token_ids,
                        output.finish_reason,
                        index=index,
                        logprobs=(generate.TokenLogprobs(logprob),),
                    )
                )
        call.finish()

    return script


async def test_answers_with_the_best_mean_logprob_come_best_first(rig):
    rig.one.script = says(("aaaa", -0.5), ("b", -1.0), ("ccccccccc", -0.25))
    body = (await rig.complete(best_of=3, n=2)).json()

    told = [(choice["index"], choice["text"], choice["logprobs"]) for choice in body["choices"]]
    assert told == [(0, "ccccccccc", None), (1, "aaaa", None)]
    assert body["usage"]["completion_tokens"] == 14


async def test_best_of_returns_the_likeliest_choice_of_each_prompt(rig):
    rig.one.script = says(("a", -2.0), ("b", -1.0))
    body = (await rig.complete(["x", "y"], best_of=2, logprobs=0)).json()

    assert [choice["text"] for choice in body["choices"]] == ["b", "b"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-1.0]


async def test_best_of_equal_to_n_returns_all_choices(rig):
    rig.one.script = outputs("a", None) + outputs("a") + outputs("bc", index=1)
    body = (await rig.complete(best_of=2, n=2)).json()

    assert [choice["text"] for choice in body["choices"]] == ["aa", "bc"]
    assert rig.one.requests[0].output_options.logprobs is None


async def test_best_of_is_refused_if_the_engine_has_no_logprobs(rig):
    await rig.worker("blind", runtime_config=model_card.ModelRuntimeConfig(supports_logprobs=False))
    answer = await rig.client.post(
        "/v1/completions", json={"model": "blind", "prompt": "x", "best_of": 2}
    )

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"
