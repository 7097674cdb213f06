"""The finish reason of a token."""

import pytest

from dynamo.engine.native import scheduler
from dynamo.protocols import generate

EOS, STOP, OTHER = 2, 7, 9
REASON = generate.FinishReason


def find(token_id, *, num_output=1, is_full=False, guided=None, **conditions):
    request = generate.Request(
        id="r",
        model="m",
        token_ids=b"",
        stop_conditions=generate.StopConditions(stop_token_ids=(STOP,), **conditions),
        sampling_options=generate.SamplingOptions(guided_decoding=guided),
        eos_token_ids=(EOS,),
    )
    return scheduler.check_finish(request, token_id, num_output=num_output, is_full=is_full)


@pytest.mark.parametrize(
    ("token_id", "fields", "expected"),
    [
        (EOS, {}, (REASON.EOS, None)),
        (STOP, {}, (REASON.STOP, STOP)),
        (OTHER, {}, (None, None)),
        (OTHER, {"is_full": True}, (REASON.LENGTH, None)),
        (OTHER, {"max_tokens": 1}, (REASON.LENGTH, None)),
        (OTHER, {"max_tokens": 2}, (None, None)),
        (EOS, {"ignore_eos": True}, (None, None)),
        (EOS, {"min_tokens": 2}, (None, None)),
        (STOP, {"min_tokens": 2}, (None, None)),
        (STOP, {"min_tokens": 2, "num_output": 2}, (REASON.STOP, STOP)),
        (EOS, {"max_tokens": 1}, (REASON.EOS, None)),
        (
            EOS,
            {"min_tokens": 2, "guided": generate.GuidedDecoding(regex="a")},
            (REASON.EOS, None),
        ),
    ],
    ids=str,
)
def test_finish_reason_of_a_token(token_id, fields, expected):
    assert find(token_id, **fields) == expected
