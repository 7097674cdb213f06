"""A text scored as evaluators do it: through the official client, by the native engine."""

import openai
from deployment import MODEL

TEXTS = ["Once upon a time there was a brave cat.", "Once upon a time there was a zzx qk ##."]


def test_likely_text_scores_better_than_an_unlikely_one(deployment):
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none") as client:

        def complete(prompt, **fields):
            return client.completions.create(model=MODEL, prompt=prompt, **fields)

        scored = complete(TEXTS, echo=True, logprobs=1, max_tokens=0)
        again = complete(TEXTS, echo=True, logprobs=1, max_tokens=0)
        written = complete(TEXTS[0], logprobs=1, max_tokens=8, temperature=0)
        whole = TEXTS[0] + written.choices[0].text
        reread = complete(whole, echo=True, logprobs=1, max_tokens=1, temperature=0)
        whole_answers = {"ignore_eos": True}  # an empty one has no mean
        best = complete(
            TEXTS[0], best_of=4, n=2, max_tokens=8, seed=1, logprobs=0, extra_body=whole_answers
        )
    likely, unlikely = (choice.logprobs for choice in scored.choices)

    assert [choice.text for choice in scored.choices] == TEXTS
    assert likely.token_logprobs[0] is None
    assert mean(likely.token_logprobs[1:]) > mean(unlikely.token_logprobs[1:])
    assert "".join(likely.tokens) == TEXTS[0]
    assert scored.usage.completion_tokens == 0
    assert again.choices[0].logprobs == likely
    told = written.choices[0].logprobs.token_logprobs
    found = reread.choices[0].logprobs.token_logprobs[len(likely.tokens) :][: len(told)]
    assert all(abs(a - b) < 1e-2 for a, b in zip(told, found, strict=True))
    means = [mean(choice.logprobs.token_logprobs) for choice in best.choices]
    assert means == sorted(means, reverse=True)


def mean(values):
    return sum(values) / len(values)
