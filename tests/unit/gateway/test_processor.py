"""One request through Envoy's external processing, message by message."""

import gzip

import msgspec
import pytest

from dynamo.gateway import ext_proc_pb2 as messages
from dynamo.gateway import processor
from dynamo.observability import metrics
from dynamo.semantic import service
from dynamo.testing import clock
from semantic_configs import ATTACK, CARD, COMPLETION, CONFIG, SUM, chat

DUPLEX = messages.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)


@pytest.fixture
def routing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return service.RoutingService(path, metrics.Registry("llm"), clock.VirtualClock())


@pytest.fixture
def stream(routing):
    return processor.StreamProcessor(routing, 10_000)


def headers(**pairs):
    values = {":method": "POST", ":path": "/v1/chat/completions", **pairs}
    return messages.HttpHeaders(
        headers=messages.HeaderMap(
            headers=[
                messages.HeaderValue(key=name, raw_value=value.encode())
                for name, value in values.items()
            ]
        )
    )


async def ask(stream, body, protocol=None, **pairs):
    """The answers to headers and body of a request."""
    first = messages.ProcessingRequest(request_headers=headers(**pairs), protocol_config=protocol)
    whole = messages.HttpBody(body=body, end_of_stream=True)
    answers = await stream.process(first)
    if any(answer.HasField("immediate_response") for answer in answers):
        return answers  # Envoy sends no more
    return answers + await stream.process(messages.ProcessingRequest(request_body=whole))


async def answer(stream, *pieces, content_type="application/json", status=200):
    """The answers to headers and body of a response."""
    head = headers(**{":status": str(status), "content-type": content_type})
    answers = await stream.process(messages.ProcessingRequest(response_headers=head))
    for number, piece in enumerate(pieces):
        body = messages.HttpBody(body=piece, end_of_stream=number == len(pieces) - 1)
        answers += await stream.process(messages.ProcessingRequest(response_body=body))
    return answers


def pairs_of(mutation):
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


async def test_buffered_body_is_changed_with_its_length(stream):
    _, reply = await ask(stream, chat("python"))

    common = reply.request_body.response
    assert msgspec.json.decode(common.body_mutation.body)["model"] == "coder"
    pairs = pairs_of(common.header_mutation)
    assert pairs["content-length"] == str(len(common.body_mutation.body))
    assert pairs["x-selected-model"] == "coder"


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
async def test_prompt_is_counted_by_the_default_model(stream, path):
    counted = {}
    for model in ("auto", "coder"):
        body = msgspec.json.encode({"model": model, "messages": []})
        _, reply = await ask(stream, body, **{":path": path})
        common = reply.request_body.response
        counted[model] = (
            msgspec.json.decode(common.body_mutation.body)["model"],
            pairs_of(common.header_mutation)["x-selected-model"],
        )

    assert counted == {"auto": ("general", "general"), "coder": ("coder", "coder")}


async def test_answer_of_another_process_is_asked_for_before_the_request_is_routed(
    stream, routing, monkeypatch
):
    async def recall(body, headers, tenant):
        outcome = routing.route(body, headers, tenant)
        routing.router.cache.store(outcome.cache_key, COMPLETION)

    monkeypatch.setattr(routing, "recall", recall)
    *_, reply = await ask(stream, chat(SUM))

    assert b"It is four." in reply.immediate_response.body


@pytest.mark.parametrize("model", ["auto", "mathy"])
async def test_model_gets_its_key_whether_it_is_chosen_or_named(stream, model):
    *_, reply = await ask(stream, chat(SUM, model), authorization="Bearer of-the-client")

    mutation = reply.request_body.response.header_mutation
    assert pairs_of(mutation)["authorization"] == "Bearer secret"


@pytest.mark.parametrize("protocol", [None, DUPLEX])
async def test_answer_is_asked_for_uncompressed_because_it_is_read(stream, protocol):
    answers = await ask(stream, chat("python"), protocol)

    head = answers[0].request_headers if protocol else answers[-1].request_body
    assert "accept-encoding" in head.response.header_mutation.remove_headers


async def test_duplex_answers_come_together_after_the_body(stream):
    first, *pieces = await ask(stream, chat("python"), DUPLEX)

    assert "content-length" in first.request_headers.response.header_mutation.remove_headers
    streamed = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert msgspec.json.decode(b"".join(piece.body for piece in streamed))["model"] == "coder"
    assert [piece.end_of_stream for piece in streamed] == [True]


@pytest.mark.parametrize("protocol", [None, DUPLEX])
async def test_attack_is_answered_at_once(stream, protocol):
    *_, reply = await ask(stream, chat(ATTACK), protocol)

    assert reply.immediate_response.status.code == 200
    assert pairs_of(reply.immediate_response.headers)["x-vsr-jailbreak-blocked"] == "true"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"\xff", 400),
        ("/v1/chat/completions", b"x" * 20_000, 413),
        ("/v1/messages", chat(ATTACK), 403),
        ("/v1/completion%73?x=1", chat(ATTACK), 403),
        ("/api/chat", chat(ATTACK), 403),
        ("/api/generate", chat(ATTACK), 403),
        ("/invocations", chat(ATTACK), 403),
        ("/v1/completions", chat("hello", prompt=f"{SUM} {CARD}"), 403),
        ("/api/generate", chat("hello", prompt=f"{SUM} {CARD}"), 403),
        ("/v1/responses", chat("hello", input=f"{SUM} {CARD}"), 403),
        ("/v2/models/m/infer", b'{"inputs": []}', 403),
        ("/inference.GRPCInferenceService/ModelStreamInfer", b"", 403),
        ("/v1/batches", b'{"input_file_id": "file-1"}', 403),
        ("/v2/models/m/versions/1/generate_stream", b'{"text_input": "hello"}', 403),
    ],
)
async def test_request_that_cannot_pass_gets_its_status(stream, path, body, status):
    *_, reply = await ask(stream, body, **{":path": path})

    assert reply.immediate_response.status.code == status


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "chat_template_kwargs", {"enable_thinking": True}),
        ("/v1/responses", "reasoning", {"effort": "medium"}),
        ("/v1/messages", "thinking", {"type": "adaptive"}),
        ("/api/chat", "think", True),
        ("/api/generate", "think", True),
        ("/v1/completions", "think", None),
    ],
)
async def test_reasoning_is_set_in_the_field_of_the_path(stream, path, field, value):
    *_, reply = await ask(stream, chat(SUM), **{":path": path})

    body = msgspec.json.decode(reply.request_body.response.body_mutation.body)
    assert body.get(field) == value


async def test_other_paths_pass_unchanged(stream):
    _, reply = await ask(stream, b"anything", **{":path": "/upload"})

    assert not reply.request_body.response.HasField("body_mutation")


async def test_body_that_the_router_does_not_read_passes_piece_by_piece(stream):
    first = messages.ProcessingRequest(
        request_headers=headers(**{":path": "/v1/files"}), protocol_config=DUPLEX
    )
    (head,) = await stream.process(first)
    passed = []
    for number in range(3):  # more than the router would read of a request
        piece = messages.HttpBody(body=b"x" * 6000, end_of_stream=number == 2)
        (answer,) = await stream.process(messages.ProcessingRequest(request_body=piece))
        passed.append(answer.request_body.response.body_mutation.streamed_response)

    assert head.HasField("request_headers")
    assert [(len(piece.body), piece.end_of_stream) for piece in passed] == [
        (6000, False),
        (6000, False),
        (6000, True),
    ]


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/messages", chat(ATTACK), ["error", "type"]),
        ("/v1/messages", b"{", ["error", "type"]),
        ("/api/chat", chat(ATTACK), ["error"]),
        ("/v2/models/m/infer", b"{}", ["error"]),
        ("/v1/responses", chat(ATTACK), ["error"]),
    ],
)
async def test_refusal_has_the_shape_of_its_api(stream, path, body, shape):
    *_, reply = await ask(stream, body, **{":path": path})

    refusal = msgspec.json.decode(reply.immediate_response.body)
    assert sorted(refusal) == shape
    is_text = path in ("/api/chat", "/v2/models/m/infer")
    assert isinstance(refusal["error"], str) == is_text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_refused_request_is_named_so_in_the_headers(stream, path):
    *_, reply = await ask(stream, chat(ATTACK), **{":path": path})

    pairs = pairs_of(reply.immediate_response.headers)
    assert pairs["x-vsr-response-path"] == "blocked"
    assert pairs["x-vsr-jailbreak-blocked"] == "true"


@pytest.mark.parametrize("protocol", [None, DUPLEX])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/upload"])
async def test_client_cannot_name_the_server_in_place_of_the_router(stream, protocol, path):
    claims = {"x-vsr-destination-endpoint": "10.9.9.9:80", "x-selected-model": "theirs"}
    answers = await ask(stream, chat("hello"), protocol, **{":path": path, **claims})

    head, *rest = [
        getattr(answer, answer.WhichOneof("response")).response.header_mutation
        for answer in answers
    ]
    assert "x-vsr-destination-endpoint" in head.remove_headers
    pairs = {name: value for one in (head, *rest) for name, value in pairs_of(one).items()}
    assert pairs.get("x-selected-model") == ("general" if path != "/upload" else None)


@pytest.mark.parametrize("text", ["hello", ATTACK])
async def test_compressed_body_is_read_and_goes_on_as_it_was_read(stream, text):
    body = gzip.compress(chat(text))
    *_, reply = await ask(stream, body, **{"content-encoding": "gzip"})

    if text == ATTACK:
        assert pairs_of(reply.immediate_response.headers)["x-vsr-jailbreak-blocked"] == "true"
        return
    common = reply.request_body.response
    assert msgspec.json.decode(common.body_mutation.body)["model"] == "general"
    assert "content-encoding" in common.header_mutation.remove_headers
    length = pairs_of(common.header_mutation)["content-length"]
    assert length == str(len(common.body_mutation.body))


async def test_unknown_encoding_of_a_body_is_refused_by_name(stream):
    *_, reply = await ask(stream, b"x", **{"content-encoding": "br"})

    assert reply.immediate_response.status.code == 415
    assert b"gzip, zstd" in reply.immediate_response.body


@pytest.mark.parametrize(("mode", "name"), [(0, "NONE"), (1, "STREAMED"), (3, "BUFFERED_PARTIAL")])
async def test_mode_in_which_no_whole_body_comes_is_refused_by_name(stream, mode, name):
    protocol = messages.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode)
    first = messages.ProcessingRequest(request_headers=headers(), protocol_config=protocol)
    (reply,) = await stream.process(first)

    assert reply.immediate_response.status.code == 500
    assert name.encode() in reply.immediate_response.body


@pytest.mark.parametrize("mode", [0, 1, 2, 4])
async def test_request_that_cannot_be_read_is_refused_in_each_mode(stream, mode):
    protocol = messages.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode)
    first = headers(**{":path": "/v2/models/m/infer"})
    request = messages.ProcessingRequest(request_headers=first, protocol_config=protocol)

    (reply,) = await stream.process(request)

    assert reply.immediate_response.status.code == 403


async def test_models_are_listed_at_once(stream):
    first = headers(**{":method": "GET", ":path": "/v1/models?x=1"})

    (reply,) = await stream.process(messages.ProcessingRequest(request_headers=first))

    assert b'"MoM"' in reply.immediate_response.body


async def test_response_gets_headers_and_event_streams_are_not_buffered(stream):
    await ask(stream, chat("python"))

    (reply,) = await answer(stream, content_type="text/event-stream")

    mutation = reply.response_headers.response.header_mutation
    assert pairs_of(mutation)["x-vsr-selected-decision"] == "code_decision"
    assert reply.mode_override.response_body_mode == 1


@pytest.mark.parametrize(
    ("path", "content_type", "mode"),
    [
        ("/api/chat", "application/x-ndjson", 1),
        ("/api/pull", "application/x-ndjson", 1),
        ("/events", "text/event-stream", 1),
        ("/v1/chat/completions", "application/json", 0),
    ],
)
async def test_streams_of_every_path_and_type_are_not_buffered(stream, path, content_type, mode):
    await ask(stream, chat("python"), **{":path": path})

    (reply,) = await answer(stream, content_type=content_type)

    assert reply.mode_override.response_body_mode == mode


async def test_answer_whose_trailers_come_behind_its_whole_body_is_counted_once(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    registry = metrics.Registry("llm")
    made = service.RoutingService(tmp_path / "config.yaml", registry, clock.VirtualClock())
    stream = processor.StreamProcessor(made, 10_000)
    await ask(stream, chat("python"))
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    await answer(stream, msgspec.json.encode({"choices": [], "usage": usage}))
    await stream.process(messages.ProcessingRequest(response_trailers=messages.HttpTrailers()))

    lines = registry.render().decode()

    assert 'llm_model_prompt_tokens_total{model="coder"} 3.0' in lines
    assert 'llm_model_completion_latency_seconds_count{model="coder"} 1.0' in lines
    # when a whole answer began to be written is not known
    assert "llm_model_tpot_seconds_count" not in lines


@pytest.mark.parametrize("protocol", [None, DUPLEX])
async def test_answer_fills_the_cache_for_the_next_request(routing, protocol):
    first = processor.StreamProcessor(routing, 10_000)
    await ask(first, chat(SUM), protocol)
    await answer(first, COMPLETION[:50], COMPLETION[50:])

    *_, reply = await ask(processor.StreamProcessor(routing, 10_000), chat(SUM), protocol)

    assert pairs_of(reply.immediate_response.headers)["x-vsr-cache-hit"] == "true"


@pytest.mark.parametrize("protocol", [None, DUPLEX])
async def test_answer_that_ends_with_trailers_fills_the_cache(routing, protocol):
    first = processor.StreamProcessor(routing, 10_000)
    await ask(first, chat(SUM), protocol)
    head = headers(**{":status": "200", "content-type": "application/json"})
    body = messages.HttpBody(body=COMPLETION)
    for message in (
        messages.ProcessingRequest(response_headers=head),
        messages.ProcessingRequest(response_body=body),
        messages.ProcessingRequest(response_trailers=messages.HttpTrailers()),
    ):
        await first.process(message)

    *_, reply = await ask(processor.StreamProcessor(routing, 10_000), chat(SUM), protocol)

    assert pairs_of(reply.immediate_response.headers)["x-vsr-cache-hit"] == "true"


async def test_duplex_response_is_passed_on_piece_by_piece(stream):
    await ask(stream, chat("python"), DUPLEX)

    _, *pieces = await answer(stream, b"one", b"two")

    bodies = [piece.response_body.response.body_mutation.streamed_response for piece in pieces]
    assert [(piece.body, piece.end_of_stream) for piece in bodies] == [
        (b"one", False),
        (b"two", True),
    ]


async def test_stream_is_measured_and_its_usage_counted(tmp_path):
    path = tmp_path / "config.yaml"
    prices = "coder: {pricing: {prompt_per_1m: 2, completion_per_1m: 6}, "
    path.write_text(CONFIG.replace("coder: {", prices))
    registry, at = metrics.Registry("llm"), clock.VirtualClock()
    stream = processor.StreamProcessor(service.RoutingService(path, registry, at), 10_000)
    await ask(stream, chat("python"))
    await at.advance(2)
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    chunks = [{"id": "a", "created": 1, "model": "m", "choices": [], "usage": usage}]
    chunks[0]["choices"] = [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]
    body = b"data: " + msgspec.json.encode(chunks[0]) + b"\n\ndata: [DONE]\n\n"
    await answer(stream, body, b"", content_type="text/event-stream")

    lines = registry.render().decode()

    assert 'llm_model_ttft_seconds_sum{model="coder"} 2.0' in lines
    assert 'llm_model_completion_latency_seconds_count{model="coder"} 1.0' in lines
    assert 'llm_model_tokens_total{kind="completion",model="coder"} 2.0' in lines
    assert 'llm_model_prompt_tokens_total{model="coder"} 3.0' in lines
    assert 'llm_completion_tokens_per_request_sum{model="coder"} 2.0' in lines
    assert 'llm_model_tpot_seconds_count{model="coder"} 1.0' in lines
    assert 'llm_model_cost_total{currency="USD",model="coder"} 1.8' in lines


@pytest.mark.parametrize(("status", "reason"), [(503, "upstream_5xx"), (404, "upstream_4xx")])
async def test_error_of_the_models_server_is_counted(tmp_path, status, reason):
    (tmp_path / "config.yaml").write_text(CONFIG)
    registry = metrics.Registry("llm")
    made = service.RoutingService(tmp_path / "config.yaml", registry, clock.VirtualClock())
    stream = processor.StreamProcessor(made, 10_000)
    await ask(stream, chat("python"))
    await answer(stream, b"{}", status=status)

    lines = registry.render().decode()

    assert f'llm_request_errors_total{{model="coder",reason="{reason}"}} 1.0' in lines


CALL = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}


@pytest.mark.parametrize(
    ("text", "choice", "end"),
    [
        (SUM, CALL, b"\n\n"),  # an answer that is not cached
        ("python", {"index": 0, "text": "x"}, b"\n\n"),  # of a decision without cache
        (SUM, {"index": 0, "delta": {"content": "4"}}, b"\r\n\r\n"),
    ],
)
async def test_usage_of_every_stream_that_reports_it_is_counted(tmp_path, text, choice, end):
    (tmp_path / "config.yaml").write_text(CONFIG)
    registry = metrics.Registry("llm")
    made = service.RoutingService(tmp_path / "config.yaml", registry, clock.VirtualClock())
    stream = processor.StreamProcessor(made, 10_000)
    await ask(stream, chat(text))
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    chunks = [{"choices": [choice]}, {"choices": [], "usage": usage}]
    head = {"id": "a", "created": 1, "model": "m", "usage": None}
    events = [b"data: " + msgspec.json.encode(head | chunk) + end for chunk in chunks]
    await answer(stream, *events, b"data: [DONE]" + end, content_type="text/event-stream")

    lines = registry.render().decode()

    model = "coder" if text == "python" else "mathy"
    assert f'llm_model_tokens_total{{kind="completion",model="{model}"}} 2.0' in lines


async def test_stream_that_reports_no_usage_is_no_answer_of_no_tokens(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    registry = metrics.Registry("llm")
    made = service.RoutingService(tmp_path / "config.yaml", registry, clock.VirtualClock())
    stream = processor.StreamProcessor(made, 10_000)
    await ask(stream, chat(SUM))
    chunk = {"id": "a", "created": 1, "model": "m", "choices": []}
    chunk["choices"] = [{"index": 0, "delta": {"content": "4"}, "finish_reason": "stop"}]
    body = b"data: " + msgspec.json.encode(chunk) + b"\n\ndata: [DONE]\n\n"
    await answer(stream, body, content_type="text/event-stream")

    assert "llm_completion_tokens_per_request_count" not in registry.render().decode()
    assert len(made.router.cache) == 1


async def test_metrics_and_log_name_what_is_only_observed_and_unread(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "config.yaml"
    observing = CONFIG.replace("threshold: 0.7}", "threshold: 0.7, mode: observe}")
    path.write_text(observing.replace("priority: 20", "priority: 20\n    mode: observe"))
    registry = metrics.Registry("llm")
    routing = service.RoutingService(path, registry, clock.VirtualClock())

    routing.route(chat(f"python {ATTACK}"), {})
    routing.route(b'{"model":"general","prompt":[1,2]}', {})
    for number in range(3):
        routing.route(chat("hello", f"nobody knows {number}"), {})

    lines = registry.render().decode()
    assert 'llm_guard_verdicts_total{action="observe",guard="jailbreak"} 1.0' in lines
    assert 'llm_guard_unread_texts_total{guard="jailbreak"} 1.0' in lines
    assert 'llm_observed_decisions_total{decision="code_decision"} 1.0' in lines
    assert 'llm_model_requests_total{model="unknown"} 3.0' in lines
    assert "nobody knows" not in lines
    assert "observed_decision: 'code_decision'" in caplog.text


def test_failed_guard_has_found_no_personal_data(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("pii_types_allowed", "on_error: block, pii_types_allowed"))
    registry = metrics.Registry("llm")
    made = service.RoutingService(path, registry, clock.VirtualClock())
    monkeypatch.setattr(made.router._classifiers, "find_pii", lambda _: 1 / 0)

    answer = made.route(chat(SUM), {}).answer

    assert b"has failed" in answer.body
    lines = registry.render().decode()
    assert 'llm_request_errors_total{model="auto",reason="classification_failed"} 1.0' in lines
    assert "llm_pii_violations_total{" not in lines


def test_request_that_goes_to_a_second_model_is_one_question_to_the_cache(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    registry = metrics.Registry("llm")
    made = service.RoutingService(tmp_path / "config.yaml", registry, clock.VirtualClock())
    for failed in ({}, {"mathy": "failed before its first token"}):
        made.route(chat(SUM), {}, "", failed)

    lines = registry.render().decode()

    assert "llm_cache_misses_total 1.0" in lines
    assert 'llm_model_requests_total{model="mathy"} 1.0' in lines
    assert 'llm_model_requests_total{model="general"} 1.0' in lines
