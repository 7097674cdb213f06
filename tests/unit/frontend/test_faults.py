"""Faults of the program, and calls that are cancelled: each answer ends, and its request is no longer open."""

import asyncio
import json

import pytest
from frontend_rig import add_parsed_worker

from dynamo.base import errors
from dynamo.frontend.apis import embeddings
from dynamo.frontend.batches import runner
from dynamo.frontend.delivery import sse, streaming
from dynamo.frontend.model_registry import registered_model
from dynamo.preprocess import preprocessor
from dynamo.preprocess.parsers import tool_calls
from waiting import PATIENT_S

LOST = "an internal error lost the answer"
SAY = [{"role": "user", "content": "hi"}]
CHAT = ("/v1/chat/completions", {"model": "m", "messages": SAY})
STREAM = (CHAT[0], CHAT[1] | {"stream": True})
COMPLETION = ("/v1/completions", {"model": "m", "prompt": ["hi", "ho"]})
MESSAGE = ("/v1/messages", {"model": "m", "messages": SAY, "max_tokens": 9, "stream": True})
LINES = ("/api/chat", {"model": "m", "messages": SAY})
EMBEDDING = ("/v1/embeddings", {"model": "e", "input": "hi"})


@pytest.fixture
async def narrow(bare):
    """A frontend that answers one request at a time, so that one that does not end keeps all others out."""
    await bare.start(rejection_frontend_request_concurrency_limit=1)
    bare.one, bare.two = await bare.worker(), await bare.embedder()
    return bare


def fail(*arguments, **options):
    raise OSError("Bad file descriptor")


async def check_fault(rig, monkeypatch, owner, name, path, fields):
    """Ask while a function of the program fails, and again when it does not; return the first answer."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        answer = await rig.client.post(path, json=fields)
    again = await rig.client.post(path, json=fields)
    counted = await rig.metrics()

    assert again.status_code == 200
    assert LOST not in again.text
    assert counted[f'dynamo_frontend_inflight_requests{{model="{fields["model"]}"}}'] == 0
    return answer


@pytest.mark.parametrize(
    ("path", "fields"), [CHAT, STREAM, COMPLETION, MESSAGE, LINES, (CHAT[0], CHAT[1] | {"n": 2})]
)
async def test_fault_in_the_last_output_ends_the_answer(narrow, monkeypatch, path, fields):
    answer = await check_fault(narrow, monkeypatch, sse, "finish_reason", path, fields)

    assert LOST in answer.text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_fault_as_a_parser_ends_ends_the_answer(narrow, monkeypatch, is_stream):
    await add_parsed_worker(narrow)
    tool = {"type": "function", "function": {"name": "look"}}
    fields = {"model": "p", "messages": SAY, "stream": is_stream, "tools": [tool]}
    async with asyncio.timeout(PATIENT_S):
        answer = await check_fault(
            narrow, monkeypatch, tool_calls.ToolCallParser, "finish", CHAT[0], fields
        )

    assert LOST in answer.text


async def test_fault_in_the_answer_with_all_vectors_ends_it(narrow, monkeypatch):
    answer = await check_fault(narrow, monkeypatch, embeddings, "EmbeddingUsage", *EMBEDDING)

    assert (answer.status_code, LOST in answer.text) == (500, True)


@pytest.mark.parametrize(("path", "fields"), [CHAT, STREAM, EMBEDDING])
async def test_fault_on_the_way_to_a_worker_ends_the_answer(narrow, monkeypatch, path, fields):
    owner = registered_model.RegisteredModel
    answer = await check_fault(narrow, monkeypatch, owner, "open_stream", path, fields)

    assert (answer.status_code, LOST in answer.text) == (500, True)


@pytest.mark.parametrize(
    ("owner", "name", "request_"),
    [
        (streaming.StreamDelivery, "__init__", STREAM),
        (preprocessor.Preprocessor, "tokenize_embedding_inputs", EMBEDDING),
    ],
)
async def test_fault_before_there_is_a_delivery_leaves_no_open_request(
    narrow, monkeypatch, owner, name, request_
):
    answer = await check_fault(narrow, monkeypatch, owner, name, *request_)

    assert answer.status_code == 500


async def test_prompt_leaves_the_queue_of_a_router_once_another_prompt_has_failed(rig, monkeypatch):
    open_stream = registered_model.RegisteredModel.open_stream
    opened, queue = [], []

    async def queue_second(self, request, receiver, options, **limits):
        opened.append(request)
        if len(opened) > 1:
            place = asyncio.get_running_loop().create_future()
            queue.append(place)
            error = errors.Cancelled("the request is over")
            options.add_disconnect_callback(lambda: place.set_exception(error))
            await place
        return await open_stream(self, request, receiver, options, **limits)

    monkeypatch.setattr(registered_model.RegisteredModel, "open_stream", queue_second)
    rig.one.script = lambda call, request: None
    answer = rig.start_task(rig.complete(["a", "b"]))
    await rig.until(lambda: queue and rig.one.calls)
    rig.one.calls[0].fail(errors.EngineFailed("out of memory"))

    assert (await answer).status_code == 500
    await rig.until(queue[0].done)


async def test_texts_of_a_cancelled_batch_that_wait_for_admission_are_no_longer_open(
    bare, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    await bare.start(
        files_dir=str(tmp_path / "files"),
        rejection_frontend_request_concurrency_limit=1,
        queue_limit=9,
    )
    worker = await bare.embedder()
    worker.script = lambda call, request: None  # no answer
    row = {"custom_id": "", "method": "POST", "url": EMBEDDING[0], "body": EMBEDDING[1]}
    content = "\n".join(json.dumps(row | {"custom_id": str(number)}) for number in range(3))
    upload = await bare.client.post(
        "/v1/files", files={"file": ("q.jsonl", content)}, data={"purpose": "batch"}
    )
    fields = {"endpoint": EMBEDDING[0], "completion_window": "24h"}
    batch = (
        await bare.client.post("/v1/batches", json={"input_file_id": upload.json()["id"], **fields})
    ).json()
    permits = bare.frontend._admission._permits
    await bare.until(lambda: "e" in permits and len(permits["e"]._queue) == 2)
    await bare.client.post(f"/v1/batches/{batch['id']}/cancel")
    await bare.until(lambda: worker.num_cancelled)
    await bare.until(lambda: not permits["e"]._queue)
    worker.script = None
    counted = await bare.metrics()

    assert counted['dynamo_frontend_inflight_requests{model="e"}'] == 0
    assert (await bare.embed("a")).status_code == 200
