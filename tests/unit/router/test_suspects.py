"""Which requests are taken for what their workers died of."""

import pytest

from dynamo.protocols import blocks, generate
from dynamo.router import retry_rules

GRAMMAR = generate.GuidedDecoding(json="{}", param="response_format")


def request(guided=None):
    options = generate.SamplingOptions(guided_decoding=guided)
    return generate.Request(id="r", model="m", token_ids=blocks.pack([1]), sampling_options=options)


@pytest.mark.parametrize(
    ("guided", "num_deaths", "has_tokens", "expected"),
    [
        (None, 1, False, False),
        (None, 2, True, True),
        (GRAMMAR, 0, False, False),
        (GRAMMAR, 1, False, True),
        (GRAMMAR, 1, True, False),
    ],
)
def test_request_is_a_suspect_after_a_death_in_preparation_or_two(
    guided, num_deaths, has_tokens, expected
):
    assert retry_rules.is_suspect(request(guided), num_deaths, has_tokens=has_tokens) is expected
