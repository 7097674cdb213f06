import msgspec
import pytest

from dynamo.semantic import answer_usage, cache

CHAT = {"usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
RESPONSE = {"object": "response", "usage": {"input_tokens": 7, "output_tokens": 3}}
MESSAGE = {
    "type": "message",
    "usage": {
        "input_tokens": 1,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 2,
        "output_tokens": 3,
    },
}
OLLAMA = {"done": True, "prompt_eval_count": 7, "eval_count": 3}
EVENTS = "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("answer", [CHAT, RESPONSE, MESSAGE, OLLAMA])
def test_each_api_reports_tokens_in_its_own_fields(answer):
    assert answer_usage.count(answer_usage.read_fields(answer)) == (7, 3)
    assert answer_usage.count(answer_usage.read_body(msgspec.json.encode(answer))) == (7, 3)


def test_rest_of_a_whole_answer_is_not_decoded():
    body = b'{"choices": [{"logprobs": 1e999, "text": "\xff"}], ' + msgspec.json.encode(CHAT)[1:]

    assert answer_usage.count(answer_usage.read_body(body)) == (7, 3)


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 3, [], {}, {"usage": None}, {"usage": [1]}, {"usage": {"prompt_tokens": 7}}),
        {"usage": {"prompt_tokens": "7", "completion_tokens": 3}},
        {"usage": {"prompt_tokens": -7, "completion_tokens": 3}},
        {"usage": {"prompt_tokens": True, "completion_tokens": 3}},
    ],
)
def test_answer_without_both_numbers_has_no_usage(answer):
    assert answer_usage.count(answer_usage.read_fields(answer)) is None


def encode_events(*answers):
    rows = (b"event: x\ndata: " + msgspec.json.encode(each) + b"\n\n" for each in answers)
    return b"".join(rows)


START = {"type": "message_start", "message": {"usage": {**MESSAGE["usage"], "output_tokens": 1}}}
DELTA = {"type": "content_block_delta", "delta": {"text": '"usage"'}}
END = {"type": "message_delta", "usage": {"output_tokens": 3}}
CREATED = {"type": "response.created", "response": {"usage": None}}
COMPLETED = {"type": "response.completed", "response": RESPONSE}


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        (EVENTS, encode_events(START, DELTA, END)),
        (EVENTS, encode_events(CREATED, COMPLETED)),
        (EVENTS, encode_events(CHAT).replace(b"event: x\n", b"")),
        ("application/x-ndjson", b'{"response":"a","done":false}\n' + msgspec.json.encode(OLLAMA) + b"\n"),
    ],
)  # fmt: skip
def test_stream_of_each_api_reports_its_tokens_however_it_is_cut(content_type, data):
    recorder = cache.make_recorder(content_type, keeps_text=False)
    for start in range(0, len(data), 5):
        recorder.feed(data[start : start + 5])

    assert answer_usage.count(recorder.usage) == (7, 3)
    assert recorder.body() is None


def test_whole_answer_needs_no_recorder():
    assert cache.make_recorder("application/json", keeps_text=True) is None
