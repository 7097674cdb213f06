"""The model that ships with us thinks no longer than it may."""

import openai
from deployment import MODEL

SAY = [{"role": "user", "content": "Tell me a story about a brave cat"}]


def test_reasoning_ends_at_its_limit_and_the_answer_follows(deployment):
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none") as client:

        def ask(**fields):
            return client.chat.completions.create(
                model=MODEL, messages=SAY, temperature=0, max_tokens=200, **fields
            )

        free = ask(reasoning_effort="high")
        cut = ask(reasoning_effort="high", extra_body={"nvext": {"max_thinking_tokens": 3}})
        none = ask(reasoning_effort="none")

    num_free, num_cut, num_none = (
        one.usage.completion_tokens_details.reasoning_tokens for one in (free, cut, none)
    )
    assert num_free > num_cut > num_none == 0
    assert num_cut <= 3 + 2  # the marks count as thought
    assert all(one.choices[0].message.content for one in (free, cut, none))
