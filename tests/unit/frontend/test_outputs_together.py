"""Outputs that come together give the same stream as one by one, in fewer writes."""

import json
import time

import pytest
from frontend_rig import EOS, card_of

from dynamo.base import clock
from dynamo.frontend import metrics
from dynamo.frontend.apis import chat, error_dialects
from dynamo.frontend.delivery import delivery, sse, streaming
from dynamo.observability import metrics as observed
from dynamo.preprocess import loading
from dynamo.protocols import generate

FIRST = generate.Output((ord("a"),), cached_tokens=0)
LAST = generate.Output((EOS,), generate.FinishReason.EOS)


class Client:
    is_streaming = True

    def __init__(self):
        self.writes = []

    def on_disconnect(self, callback):
        pass

    def write(self, data):
        self.writes.append(data)

    end = write


def one_by_one(text):
    return [generate.Output((number,)) for number in text.encode()]


async def stream(preparer, rest, *, together, **fields):
    """What the client gets, in how many writes, and the tokens that were counted."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    request = chat.decode(json.dumps(body).encode())
    prompts = await chat.prepare(preparer, request, "r")
    identity = sse.Identity(
        request_id="r", created=0, model="m", fingerprint="f", text=preparer.text,
        sampling=prompts[0].request.sampling_options, context_length=200, clock=clock.SystemClock(),
    )  # fmt: skip
    prepared = delivery.PreparedRequest(
        formatter=chat.ChatFormatter(request, identity), dialect=error_dialects.OPENAI,
        preparer=preparer, prompts=prompts, request=request,
    )  # fmt: skip
    families = metrics.FrontendMetrics(observed.Registry("test"), time.monotonic)
    meter = metrics.RequestMeter(families.for_model("m"), "chat", is_stream=True)
    client = Client()
    answer = streaming.StreamDelivery(client, prepared, meter)
    (attempt,) = answer.make_attempts(lambda attempt, error: False)
    attempt.receive(FIRST)
    if together:
        attempt.receive_all(rest)
    else:
        for output in rest:
            attempt.receive(output)
    return b"".join(client.writes), len(client.writes), meter.num_tokens


@pytest.mark.parametrize(
    ("rest", "fields", "num_writes"),
    [
        (one_by_one("bcd"), {}, 2),
        ([*one_by_one("bcd"), LAST], {}, 3),
        (one_by_one("éx"), {}, 2),
        ([*one_by_one("bXYc"), LAST], {"stop": "XY"}, 3),
        ([*one_by_one("bc"), LAST], {"stream_options": {"continuous_usage_stats": True}}, 4),
    ],
    ids=["text", "end", "character of two tokens", "stop string", "usage in each chunk"],
)
async def test_outputs_together_give_the_same_stream(model_dir, rest, fields, num_writes):
    preparer = loading.load_preprocessor(card_of(model_dir), clock.SystemClock())
    apart = await stream(preparer, rest, together=False, **fields)
    joined = await stream(preparer, rest, together=True, **fields)

    assert joined[0] == apart[0]
    assert joined[1] == num_writes
    assert joined[2] == apart[2]


async def test_stream_of_plain_text_makes_its_template_once(model_dir, monkeypatch):
    preparer = loading.load_preprocessor(card_of(model_dir), clock.SystemClock())
    templates, make = [], sse.make_template

    def count(*arguments):
        templates.append(make(*arguments))
        return templates[-1]

    monkeypatch.setattr(sse, "make_template", count)
    last = generate.Output((ord("c"),), generate.FinishReason.LENGTH)
    text, _, _ = await stream(preparer, [*one_by_one("b"), last], together=False)

    assert b'"content":"c"' in text
    assert len(templates) == 1
