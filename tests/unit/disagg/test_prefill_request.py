"""What a prefill worker is asked for a request."""

import msgspec
import pytest

from dynamo.disagg import prefill_request
from dynamo.protocols import blocks, generate, kv_transfer

REQUEST = generate.Request(
    id="r",
    model="m",
    token_ids=blocks.pack(range(9)),
    stop_conditions=generate.StopConditions(
        max_tokens=50, min_tokens=3, stop=("x",), stop_token_ids=(7,), ignore_eos=True
    ),
    sampling_options=generate.SamplingOptions(temperature=0.7, seed=3, presence_penalty=0.5),
    output_options=generate.OutputOptions(logprobs=2),
    eos_token_ids=(2,),
    thinking=generate.ThinkingLimit(max_tokens=5, close_ids=(4,)),
    annotations=("timing",),
    priority=1,
    num_resumed=2,
    first_choice=1,
)


def test_it_is_the_request_of_one_token():
    asked = prefill_request.make(REQUEST)

    expected = msgspec.structs.replace(
        REQUEST,
        stop_conditions=generate.StopConditions(
            max_tokens=1, min_tokens=1, stop_token_ids=(7,), ignore_eos=True
        ),
        annotations=(),
        kv_transfer_params=kv_transfer.PREFILL_WITH_TOKEN,
    )
    assert asked == expected


@pytest.mark.parametrize(("min_tokens", "asked"), [(0, 0), (1, 1), (9, 1)])
def test_the_end_is_as_possible_as_in_the_answer(min_tokens, asked):
    stops = generate.StopConditions(min_tokens=min_tokens)
    made = prefill_request.make(msgspec.structs.replace(REQUEST, stop_conditions=stops))

    assert made.stop_conditions.min_tokens == asked


def test_for_several_choices_no_token_is_wanted():
    options = generate.SamplingOptions(n=2, temperature=0.7, seed=3)
    asked = prefill_request.make(msgspec.structs.replace(REQUEST, sampling_options=options))

    assert asked.kv_transfer_params == kv_transfer.PREFILL_ONLY
    assert asked.sampling_options == generate.SamplingOptions(temperature=0.0)
    assert (asked.token_ids, asked.priority) == (REQUEST.token_ids, 1)
