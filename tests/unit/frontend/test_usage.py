"""Token counts, as OpenAI writes them."""

import msgspec

from dynamo.frontend.delivery import sse


def test_usage_has_the_names_that_clients_read():
    details = sse.PromptTokensDetails(cached_tokens=16)
    usage = sse.Usage(
        prompt_tokens=20, completion_tokens=5, total_tokens=25, prompt_tokens_details=details
    )

    assert msgspec.to_builtins(usage) == {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
