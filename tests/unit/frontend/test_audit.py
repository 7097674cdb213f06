"""The audit log has requests and responses of the clients that allow it, and no key."""

import datetime
import json

import msgspec
import pytest
from frontend_rig import outputs

from dynamo.frontend import request_records

CHAT = "/v1/chat/completions"


def body(**fields):
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.fixture
async def audited(bare, tmp_path):
    bare.path = tmp_path / "audit.jsonl"
    await bare.start(audit_sinks=("jsonl",), audit_output_path=str(bare.path))
    bare.one = await bare.worker()
    return bare


async def rows(rig):
    await rig.frontend._records.close()
    return [json.loads(line) for line in rig.path.read_text().splitlines()]


async def test_row_has_request_and_whole_response(audited):
    text = json.dumps(body(store=True), indent=2)  # on several lines
    answer = await audited.client.post(
        CHAT,
        content=text,
        headers={"authorization": "Bearer secret-key", "x-request-id": "mine"},
    )
    (row,) = await rows(audited)

    assert (row["schema_version"], row["request_id"], row["model"]) == (1, "mine", "m")
    assert (row["requested_streaming"], row["status"], row["is_complete"]) == (False, 200, True)
    assert row["request"] == body(store=True)
    assert row["response"] == answer.json()
    assert "secret-key" not in audited.path.read_text()


async def test_row_says_when_and_with_which_key_it_was_asked(bare, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "alice"\nkey = "sk-alice-of-acme"\n')
    bare.path = tmp_path / "audit.jsonl"
    await bare.start(
        audit_sinks=("jsonl",), audit_output_path=str(bare.path), api_keys_file=str(keys)
    )
    await bare.worker()
    before = datetime.datetime.now(datetime.UTC)
    headers = {"authorization": "Bearer sk-alice-of-acme"}
    await bare.client.post(CHAT, json=body(store=True), headers=headers)
    (row,) = await rows(bare)
    asked_at = datetime.datetime.fromisoformat(row["time"])

    assert row["key"] == "alice"
    assert before <= asked_at <= datetime.datetime.now(datetime.UTC)
    assert "sk-alice" not in bare.path.read_text()


async def test_row_of_a_stream_has_its_events(audited):
    audited.one.script = outputs("hey")
    await audited.client.post(CHAT, json=body(store=True, stream=True))
    (row,) = await rows(audited)
    said = [choice["delta"].get("content", "") for e in row["response"] for choice in e["choices"]]

    assert row["requested_streaming"] is True
    assert "".join(said) == "hey"


async def test_row_of_a_stream_of_lines_has_its_lines(audited):
    audited.one.script = outputs("hey")
    answer = await audited.client.post("/api/chat", json=body(store=True))
    (row,) = await rows(audited)

    assert row["response"] == [json.loads(line) for line in answer.text.splitlines()]


async def test_refused_request_is_recorded(audited):
    await audited.client.post(CHAT, json=body(store=True, temperature=9))
    (row,) = await rows(audited)

    assert row["status"] == 400
    assert row["response"]["error"]["param"] == "temperature"


async def test_refused_body_that_is_no_text_leaves_the_rows_readable(audited):
    await audited.client.post(CHAT, json=body(store=True))
    await audited.client.post(CHAT, content=b'{"store": true, "model": "m", "user": "\xff"}')
    rows_by_status = {row["status"]: row for row in await rows(audited)}

    assert rows_by_status.keys() == {200, 400}
    assert rows_by_status[400]["request"]["user"] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"store": None}])
async def test_request_without_store_is_not_recorded(audited, fields):
    await audited.client.post(CHAT, json=body(**fields))
    await audited.client.post(CHAT, content=b"no json")

    assert await rows(audited) == []


async def test_forced_audit_records_every_request(bare, tmp_path):
    bare.path = tmp_path / "audit.jsonl"
    await bare.start(
        audit_sinks=("jsonl",), audit_output_path=str(bare.path), audit_force_logging=True
    )
    bare.one = await bare.worker()
    await bare.chat()
    (row,) = await rows(bare)

    assert row["response"]["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "hi"}),
        ("/api/embed", {"input": "hi"}),
        ("/v1/rerank", {"query": "hi", "documents": ["a"]}),
        ("/v1/embeddings", {"input": "hi", "dimensions": 999}),
    ],
)
async def test_forced_audit_records_requests_for_vectors(bare, tmp_path, path, fields):
    bare.path = tmp_path / "audit.jsonl"
    await bare.start(
        audit_sinks=("jsonl",), audit_output_path=str(bare.path), audit_force_logging=True
    )
    await bare.embedder()
    answer = await bare.client.post(path, json={"model": "e", **fields})
    (row,) = await rows(bare)

    assert (row["path"], row["model"], row["status"]) == (path, "e", answer.status_code)
    assert row["request"] == {"model": "e", **fields}
    assert row["response"] == answer.json()


async def test_no_form_of_a_body_evades_a_forced_audit(bare, tmp_path):
    bare.path = tmp_path / "audit.jsonl"
    await bare.start(
        audit_sinks=("jsonl",), audit_output_path=str(bare.path), audit_force_logging=True
    )
    bare.one = await bare.worker()
    marked = await bare.client.post(CHAT, content=b"\xef\xbb\xbf" + json.dumps(body()).encode())
    raw = b"\x02\x00\x00\x00hi"
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES"}
    head = {"inputs": [tensor | {"parameters": {"binary_data_size": len(raw)}}]}
    binary = await bare.client.post(
        "/v2/models/m/infer",
        content=json.dumps(head).encode() + raw,
        headers={"inference-header-content-length": str(len(json.dumps(head)))},
    )
    first, second = await rows(bare)

    assert (marked.status_code, binary.status_code) == (200, 200)
    assert first["request"] == body()
    assert second["request"].endswith("hi")
    assert second["response"] == binary.json()


async def test_disconnected_client_is_recorded_with_what_it_received(audited):
    audited.one.script = outputs("hey", reason=None)  # and never ends
    async with audited.client.stream("POST", CHAT, json=body(store=True, stream=True)) as answer:
        async for line in answer.aiter_lines():
            if "y" in line:
                break
    await audited.until(lambda: audited.one.num_cancelled)
    (row,) = await rows(audited)

    assert row["is_complete"] is False
    assert len(row["response"]) == 3


async def test_recorded_answer_has_the_rate_limit_headers_after_its_charge(bare, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-key-0001"\ntokens_per_minute = 1000\n')
    path = tmp_path / "audit.jsonl"
    await bare.start(api_keys_file=str(keys), audit_sinks=("jsonl",), audit_output_path=str(path))
    await bare.worker()
    answer = await bare.client.post(
        CHAT, json=body(store=True), headers={"authorization": "Bearer sk-key-0001"}
    )

    assert answer.status_code == 200
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000


async def test_store_is_a_hint_without_an_audit_log(rig):
    assert (await rig.chat(store=True)).status_code == 200


async def test_what_is_in_the_place_of_a_model_is_recorded_and_not_decoded(audited):
    model = '{"a": [' + "[],\n" * 1000 + "[]]}"
    content = '{"store": true, "stream": true, "model": ' + model + "}"
    await audited.client.post(CHAT, content=content)
    (row,) = await rows(audited)
    watched = request_records._decode_fields(content)

    assert (row["model"], row["requested_streaming"]) == (json.loads(model), True)
    assert isinstance(watched.model, msgspec.Raw)
