"""`/openapi.json` and `/docs` describe what is served: every route, and nothing else."""

from unittest import mock

import jsonschema_rs
import msgspec
import pytest
from frontend_rig import events, outputs

from dynamo.frontend import service
from dynamo.frontend.apis import chat as chat_request
from dynamo.frontend.apis import description, openapi
from dynamo.observability import metrics
from dynamo.protocols import generate

OPERATIONS = service.Frontend._declare_operations(*[mock.MagicMock()] * 6)
DOCUMENT = openapi.make_document(OPERATIONS, "1.2.3")


async def test_routes_and_descriptions_come_from_one_list(rig):
    pairs = {(operation.method, operation.path) for operation in OPERATIONS}

    assert rig.frontend._app.routes.table == pairs
    assert len(pairs) == len(OPERATIONS)


async def test_openapi_document_is_served(rig):
    answer = await rig.client.get("/openapi.json")

    assert answer.json()["paths"].keys() == DOCUMENT["paths"].keys()
    assert answer.json()["openapi"] == "3.1.0"


def test_openapi_document_is_valid():
    ids = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    references = set()

    def walk(value):
        if isinstance(value, dict):
            references.add(value.get("$ref"))
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(DOCUMENT)
    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}

    assert len(ids) == len(set(ids))
    assert references - {None} <= known
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


def test_mistyped_threshold_contradicts_the_description():
    schema = DOCUMENT["components"]["schemas"]["ThresholdChange"]
    is_valid = jsonschema_rs.validator_for(schema).is_valid

    assert is_valid({"model": "m", "active_decode_blocks_threshold": 0.5})
    assert not is_valid({"model": "m", "active_decode_block_threshold": 0.5})


def test_described_limits_equal_those_of_the_decoder():
    fields = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]

    assert {"type": "number", "minimum": 0, "maximum": 2} in fields["temperature"]["anyOf"]
    assert fields["audio"] == {"type": "null", "default": None}
    assert fields.keys() == {
        field.name for field in msgspec.structs.fields(chat_request.ChatRequest)
    }


def schema(name):
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


ANSWERS = {
    "/v1/chat/completions": ("ChatCompletion", {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": ("Completion", {"prompt": "x"}),
    "/v1/responses": ("Response", {"input": "x"}),
    "/v1/messages": (
        "MessageAnswer",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    ),
}
EVENTS = {
    "/v1/chat/completions": "ChatChunk",
    "/v1/completions": "Completion",
    "/v1/responses": "ResponseEvent",
    "/v1/messages": "MessageEvent",
}


@pytest.mark.parametrize("path", ANSWERS)
async def test_answers_are_as_described(rig, path):
    name, body = ANSWERS[path]
    whole = await rig.client.post(path, json={"model": "m", **body})
    rig.one.script = outputs("hey")
    stream = await rig.client.post(path, json={"model": "m", "stream": True, **body})
    found = [part.partition("data: ")[2] for part in stream.text.split("\n\n") if part]

    jsonschema_rs.validate(schema(name), whole.json())
    for data in events("\n\n".join(found)):
        if data != "[DONE]":
            jsonschema_rs.validate(schema(EVENTS[path]), data)


EVERYTHING = {
    "service_tier": "auto",
    "return_token_ids": True,
    "nvext": {"extra_fields": ["worker_id", "timing"]},
    "stop": "y",
}


def strict(name):
    """Return a schema by which an answer has no fields but those that are described."""
    closed = {
        each: described | ({"additionalProperties": False} if "properties" in described else {})
        for each, described in DOCUMENT["components"]["schemas"].items()
    }
    return {"$ref": f"#/components/schemas/{name}", "components": {"schemas": closed}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_fields_that_a_client_asks_for_are_described(rig, path):
    name, body = ANSWERS[path]
    body = {"model": "m", **EVERYTHING, **body}
    stream = await rig.client.post(path, json=body | {"stream": True})
    chunks = [event for event in events(stream.text) if event != "[DONE]"]
    logprobs = (generate.TokenLogprobs(-1.0, ()),) * 9
    rig.one.script = [
        generate.Output((121,), prompt_logprobs=logprobs, cached_tokens=0),
    ]
    whole = await rig.client.post(path, json=body | {"prompt_logprobs": 0})

    assert "prompt_logprobs" in whole.text
    jsonschema_rs.validate(strict(name), whole.json())
    for chunk in chunks:
        jsonschema_rs.validate(strict(EVENTS[path]), chunk)


@pytest.mark.parametrize(
    "operation",
    [
        entry
        for entry in OPERATIONS
        if entry.method == "POST"
        and "*" not in entry.path
        and entry.answer is not None
        and entry.tag != "Files and batches"  # they need a file first: `test_batches`
        and not entry.path.startswith("/models/")  # a model on demand: `test_model_changes`
    ],
    ids=lambda operation: operation.path,
)
async def test_examples_are_answered(rig, operation):
    await rig.embedder()
    model = "e" if operation.path.endswith(("/embeddings", "/embed", "/score", "/rerank")) else "m"
    answer = await rig.client.post(operation.path, json={"model": model, **operation.example})

    assert answer.status_code == 200, answer.text


_CUT_OFF = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Par'}}],
}


@pytest.mark.parametrize(
    ("path", "name", "body", "status"),
    [
        ("/tokenize", "TokenizeRequest", {"messages": [_CUT_OFF]}, 200),
        ("/v1/chat/completions", "ChatRequest", {"messages": [_CUT_OFF]}, 200),
        ("/v1/completions", "CompletionRequest", {"prompt": ""}, 400),
        ("/v1/completions", "CompletionRequest", {"prompt": ["x", ""]}, 400),
        (
            "/v1/responses",
            "ResponsesRequest",
            {"input": "x", "include": ["message.output_text.logprobs"]},
            400,
        ),
        *(
            (f"/v1/messages{path}", name, {"max_tokens": 5, **body}, status)
            for path, name in (("", "MessageRequest"), ("/count_tokens", "MessageCountRequest"))
            for body, status in (
                ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, 200),
                ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400),
                ({"messages": [{"role": "system", "content": [{"type": "image"}]}]}, 400),
                ({"messages": [{"role": "user", "content": "x"}], "system": [{}]}, 400),
                ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400),
            )
        ),
        *(
            (f"/v1/responses{path}", name, body, status)
            for path, name in (("", "ResponsesRequest"), ("/input_tokens", "ResponseCountRequest"))
            for body, status in (
                ({"input": [{"role": "user", "content": "x"}]}, 200),
                ({"input": [{"content": "x"}]}, 400),
                ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, 400),
                ({"input": [{"type": "reasoning", "summary": [], "content": [{}]}]}, 400),
                ({"input": "x", "tools": [{"type": "custom"}]}, 400),
            )
        ),
    ],
)
async def test_description_allows_exactly_what_is_answered(rig, path, name, body, status):
    body = {"model": "m", **body}
    answer = await rig.client.post(path, json=body)

    assert answer.status_code == status, answer.text
    assert jsonschema_rs.validator_for(schema(name)).is_valid(body) == (status == 200)


async def test_page_lists_every_route_without_external_resources(rig):
    answer = await rig.client.get("/docs")

    for path in DOCUMENT["paths"]:
        assert f"<code>{path}</code>" in answer.text
    assert f"curl {rig.frontend.url}/v1/chat/completions" in answer.text
    assert "stream_options.include_usage" in answer.text
    assert "src=" not in answer.text
    assert "<script" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_page_escapes_host_and_model():
    evil = "<script>alert(1)</script>"
    page = description.make_page(DOCUMENT, host=evil, model=evil).decode()

    assert "<script>" not in page


def test_response_without_a_schema_is_described_by_its_media_type():
    described = DOCUMENT["paths"]["/metrics"]["get"]["responses"]

    assert [*described] == ["200"]
    assert [*described["200"]["content"]] == [metrics.CONTENT_TYPE]
