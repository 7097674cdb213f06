"""Frames survive any cut of the bytes, and nothing but RemoteProtocolError comes of wrong ones."""

import itertools

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.protocols import generate, wire

decode = wire.make_decoder(generate.Output)
numbers = st.integers(0, 2**63)
texts = st.text(max_size=20)
raws = (st.none() | st.integers(0, 9) | texts).map(msgspec.msgpack.encode).map(msgspec.Raw)
outputs = st.builds(
    generate.Output,
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    st.none() | st.sampled_from(generate.FinishReason),
    st.integers(0, 3),
)
items = st.lists(st.builds(wire.StepItem, numbers, outputs), max_size=5).map(tuple)
frames = st.one_of(
    st.builds(wire.Hello, numbers, texts),
    st.builds(wire.Welcome, numbers, st.lists(texts, max_size=3).map(tuple)),
    st.builds(
        wire.Open,
        numbers,
        texts,
        raws,
        st.dictionaries(texts, texts, max_size=3),
        st.none() | st.floats(0.001, wire.MAX_TIMEOUT_S),
    ),
    st.builds(wire.Cancel, numbers, st.none() | numbers),
    st.builds(wire.Step, items, st.lists(numbers, max_size=3).map(tuple)),
    st.builds(wire.Reply, numbers, raws),
    st.builds(wire.Fail, numbers, texts, texts, st.none() | texts, st.none() | st.floats(0, 1e8)),
    st.builds(wire.Goodbye, texts),
    st.builds(wire.Ping, numbers),
    st.builds(wire.Pong, numbers),
)


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 10**6), max_size=10))
def test_frames_survive_any_cut_of_the_bytes(sent, places):
    reader = wire.FrameReader(decode=decode)
    data = b"".join(map(wire.encode, sent))

    assert [frame for part in cut(data, places) for frame in reader.feed(part)] == sent


@given(st.binary(max_size=200), st.lists(st.integers(0, 10**6), max_size=5))
@example(b"GET / HTTP/1.1\r\n\r\n", [])
@example(b"\0\0\0\x02\x91\xc1", [])
@example(b"\0\0\0\x00", [])
@example(b"\0\0\x01\x00" + b"\x91" * 256, [])
@example(b"\0\0\0\x05\x92\x07\xa2\xff\xff", [])
def test_wrong_bytes_are_a_remote_protocol_error_or_not_yet_a_frame(data, places):
    reader = wire.FrameReader(decode=decode)
    try:
        for part in cut(data, places):
            reader.feed(part)
    except errors.RemoteProtocolError:
        pass


@given(st.binary(max_size=100))
def test_random_body_decodes_or_raises_remote_protocol_error(body):
    try:
        frame = decode(body)
    except errors.RemoteProtocolError:
        return

    assert decode(wire.encode(frame)[4:]) == frame


@pytest.mark.parametrize("length", [wire.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_frame_over_the_limit_is_refused_by_its_length(length):
    with pytest.raises(errors.RemoteProtocolError, match=str(length)):
        wire.FrameReader().feed(length.to_bytes(4, "big"))


def test_limit_of_a_reader_can_be_raised():
    reader, frame = wire.FrameReader(8), wire.Goodbye("more than eight bytes")
    reader.max_frame_bytes = 100

    assert reader.feed(wire.encode(frame)) == [frame]


def test_sending_a_frame_over_the_limit_raises_local_protocol_error():
    with pytest.raises(errors.LocalProtocolError, match="Goodbye"):
        wire.encode(wire.Goodbye("x" * wire.MAX_FRAME_BYTES))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_time_limit_is_refused(timeout_s):
    frame = wire.Open(1, "a/b/c", msgspec.Raw(b"\xc0"), {}, timeout_s)
    with pytest.raises(errors.RemoteProtocolError):
        decode(wire.encode(frame)[4:])


def test_fields_appended_by_a_newer_peer_are_ignored():
    assert decode(msgspec.msgpack.encode([3, 7, None, "new"])) == wire.Cancel(7)


def test_encoded_token_has_few_bytes():
    step = wire.Step((wire.StepItem(1, generate.Output((5,))),) * 100)

    assert len(wire.encode(step)) < 100 * 15


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("bad", param="logit_bias"),
        errors.InvalidRequest("bad"),
        errors.Overloaded("busy", retry_after_s=7.5),
        errors.NoWorkers("none", retry_after_s=-1.0),
        errors.RateLimited("slowly", retry_after_s=30.0),
        errors.EngineFailed("boom"),
    ],
)
def test_error_details_for_the_client_are_sent(error):
    (frame,) = wire.FrameReader().feed(wire.encode(wire.Fail.of(3, error)))
    arrived = frame.error

    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert getattr(arrived, "param", None) == getattr(error, "param", None)
    if isinstance(error, errors.Unavailable | errors.RateLimited):
        assert arrived.retry_after_s == max(0.0, error.retry_after_s)


def test_error_that_names_a_file_by_no_text_reaches_the_client():
    (frame,) = wire.FrameReader().feed(
        wire.encode(wire.Fail.of(3, errors.EngineFailed("caf\udce9")))
    )

    assert str(frame.error) == "caf\\udce9"


def test_error_without_optional_details_is_decoded():
    old = msgspec.msgpack.encode([6, 3, "overloaded", "busy"])
    arrived = decode(old).error

    assert type(arrived) is errors.Overloaded
    assert arrived.retry_after_s == 1.0
