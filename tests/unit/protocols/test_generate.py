"""The internal request and its outputs as they are encoded between processes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import blocks, generate, kv_transfer

requests = st.builds(
    generate.Request,
    id=st.text(max_size=10),
    model=st.text(max_size=10),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(blocks.pack),
    stop_conditions=st.builds(
        generate.StopConditions,
        max_tokens=st.none() | st.integers(1, 100),
        stop=st.lists(st.text(max_size=5), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
    ),
    sampling_options=st.builds(
        generate.SamplingOptions,
        temperature=st.floats(0, 2),
        seed=st.none() | st.integers(0, 2**63 - 1),
        logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    ),
    output_options=st.builds(generate.OutputOptions, logprobs=st.none() | st.integers(0, 20)),
    eos_token_ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    kv_transfer_params=st.none()
    | st.builds(
        kv_transfer.KvTransferParams,
        do_remote_decode=st.booleans(),
        do_remote_prefill=st.booleans(),
        connector=st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9)),
    ),
)
logprobs = st.builds(
    generate.TokenLogprobs,
    st.floats(-50, 0),
    st.lists(st.builds(generate.TopLogprob, st.integers(0, 9), st.floats(-50, 0)), max_size=3).map(
        tuple
    ),
)
outputs = st.builds(
    generate.Output,
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    st.none() | st.sampled_from(generate.FinishReason),
    st.integers(0, 3),
    st.none() | st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 100) | st.text(max_size=3),
)


@given(requests)
def test_request_is_unchanged_by_encoding_and_decoding(request):
    body = msgspec.msgpack.encode(request)

    assert msgspec.msgpack.decode(body, type=generate.Request) == request
    assert request.prompt_len == len(blocks.unpack(request.token_ids))


@given(outputs)
def test_output_is_unchanged_by_encoding_and_decoding(output):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=generate.Output) == output


def test_default_values_are_not_sent():
    request = generate.Request(id="r", model="m", token_ids=b"")

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request)) == {
        "id": "r",
        "model": "m",
        "token_ids": b"",
    }


def test_request_with_a_wrong_type_is_refused():
    with pytest.raises(msgspec.ValidationError, match=r"max_tokens"):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode(
                {"id": "", "model": "", "token_ids": b"", "stop_conditions": {"max_tokens": "9"}}
            ),
            type=generate.Request,
        )
