"""`POST /v1/embeddings` over real HTTP, with workers that embed by a script."""

import asyncio
import base64
import json

import openai
import pytest

from dynamo.base import errors
from dynamo.frontend.apis import embeddings
from dynamo.preprocess import options
from dynamo.protocols import blocks, encoders, generate, model_card


@pytest.fixture
async def rig(bare):
    """A frontend with one worker that embeds."""
    await bare.start()
    bare.one = await bare.embedder()
    return bare


def vectors(answer):
    return [one["embedding"] for one in answer.json()["data"]]


async def test_vectors_are_in_the_order_of_the_texts(rig):
    answer = await rig.embed("abc", "d")

    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3, 97, 0, 0]},
            {"object": "embedding", "index": 1, "embedding": [1, 100, 0, 0]},
        ],
        "model": "e",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc", ["abc"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])],
)
async def test_input_may_be_texts_or_token_lists(rig, given, expected):
    await rig.client.post("/v1/embeddings", json={"model": "e", "input": given})

    assert rig.one.prompts == expected


async def test_base64_is_the_vector_in_32_bit_floats(rig):
    answer = await rig.embed("abc", encoding_format="base64")

    assert vectors(answer) == [base64.b64encode(encoders.pack([3, 97, 0, 0])).decode()]


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
async def test_openai_client_gets_the_same_vectors_in_each_encoding(client, encoding):
    answer = await client.embeddings.create(
        model="e", input=["abc", "d"], encoding_format=encoding, user="me"
    )

    found = [one.embedding for one in answer.data]
    if encoding == "base64":
        found = [encoders.unpack(base64.b64decode(one)) for one in found]
    assert found == [[3, 97, 0, 0], [1, 100, 0, 0]]
    assert answer.usage.total_tokens == 4


async def test_model_with_shortenable_vectors_shortens_its_vectors(bare, model_dir):
    await bare.start()
    facts = model_card.EmbeddingFacts(dimensions=4, can_shorten=True)
    await bare.embedder(embedding=facts)

    assert vectors(await bare.embed("abc", dimensions=2)) == [[3, 97]]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "none in number 0"),
        ({"input": []}, "input", "an empty list"),
        ({"input": ["a", ""]}, "input", "none in number 1"),
        ({"input": [[]]}, "input", "none in number 0"),
        ({"input": ["a", 1]}, "input", "a mixed list"),
        ({"input": [999]}, "input", "token ids from 0 to 256, got 999"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 inputs, got 2049"),
        ({"input": ["ok", "x" * 201]}, "input", "maximum context length is 200 tokens"),
        ({"input": ["x" * 200] * 1501}, "input", "at most 300000 tokens in all inputs"),
        ({"input": {"text": "a"}}, "input", "got an object"),
        ({}, "input", "required"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "dimensions": 2}, "dimensions", "expected 4 or nothing"),
        ({"input": "a", "dimensions": 0}, "dimensions", "expected"),
        ({"input": "a", "nvext": {}}, "nvext", "not supported"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "expected 'float32'"),
        ({"input": "a", "endianness": "big"}, "endianness", "expected 'little' or 'native'"),
        ({"input": "a", "use_activation": False}, "use_activation", "expected True"),
        ({"input": "a", "normalize": False}, "normalize", "expected True"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", "expected True"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "expected -1"),
    ],
)
async def test_invalid_embedding_field_is_a_400_with_its_name(rig, body, param, message):
    answer = await rig.client.post("/v1/embeddings", json={"model": "e", **body})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert not rig.one.calls


async def test_input_as_long_as_the_context_is_embedded(rig):
    assert vectors(await rig.embed("x" * 200)) == [[200, 120, 0, 0]]


@pytest.mark.parametrize("text", ["x" * 201, "x" * 300_000, [120] * 201])
async def test_input_is_cut_to_the_context_on_request(rig, text):
    answer = await rig.embed(text, truncate_prompt_tokens=-1)

    assert vectors(answer) == [[200, 120, 0, 0]]
    assert answer.json()["usage"]["prompt_tokens"] == 200


async def test_unknown_embedding_model_is_a_404(rig):
    answer = await rig.embed("a", model="other")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_embedding_model_refuses_chats(rig):
    listed = (await rig.client.get("/v1/models")).json()
    chat = await rig.chat(model="e")
    completion = await rig.complete(model="e")

    assert [one["id"] for one in listed["data"]] == ["e"]
    for answer in (chat, completion):
        assert answer.status_code == 400
        assert "'e' makes embeddings, not text" in answer.json()["error"]["message"]


async def test_text_model_refuses_embeddings_with_the_task_option(rig):
    await rig.worker("m")

    answer = await rig.embed("a", model="m")

    assert answer.status_code == 400
    assert "--task embed" in answer.json()["error"]["message"]


async def test_clearing_caches_skips_workers_without_a_cache(rig):
    answer = await rig.client.post("/clear_kv_blocks")

    assert answer.json() == {"message": "No active worker groups found"}


async def test_large_request_is_split_among_workers(rig):
    other = await rig.embedder()

    answer = await rig.embed(*("x" * 190 for _ in range(8)), "y")

    assert [one[0] for one in vectors(answer)] == [190] * 8 + [1]
    assert [len(one.requests[0].inputs) for one in (rig.one, other)] in ([5, 4], [4, 5])


async def test_disconnected_client_cancels_the_request_at_the_worker(rig):
    rig.one.script = lambda call, request: None
    task = rig.start_task(rig.embed("a"))
    await rig.until(lambda: rig.one.calls)

    task.cancel()

    await rig.until(lambda: rig.one.num_cancelled)
    found = await rig.metrics()
    labels = 'endpoint="embeddings",error_type="cancelled",model="e",request_type="unary"'
    assert found[f'dynamo_frontend_requests_total{{{labels},status="error"}}'] == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (lambda call, _: call.fail(errors.Overloaded("busy")), 503),
        (lambda call, _: call.fail(errors.EngineFailed("no memory")), 500),
        (lambda call, _: call.finish(), 503),
        (lambda call, _: call.reply("what"), 500),
        (lambda call, _: call.reply(encoders.Vectors((0,), b"short")), 500),
        (lambda call, _: call.reply(encoders.Vectors((7,), encoders.pack([0] * 4))), 500),
        (lambda call, _: call.send(generate.Output((1,))), 500),
        (lambda call, _: call.reply(encoders.Vectors((0, 0), encoders.pack([0] * 8))), 500),
    ],
)
async def test_failure_or_malformed_reply_of_a_worker_is_an_error(rig, script, status):
    rig.one.script = script

    answer = await rig.embed("a", "b")

    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def lose(workers, *losses):
    """Let these workers answer, but lose the next requests by these errors, each after the vector of its last text."""
    left = list(losses)

    def script(call, request):
        for number, token_ids in reversed(list(enumerate(request.inputs))):
            text = blocks.unpack(token_ids)
            call.reply(encoders.Vectors((number,), encoders.pack([len(text), text[0], 0, 0])))
            if left:
                call.fail(left.pop(0))
                return
        call.finish()

    for worker in workers:
        worker.script = script


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerLost("the worker is draining: ask another"),
        errors.StreamBroken("worker at x closed the connection"),
        errors.WorkerDied("worker at x closed the connection"),
        errors.Overloaded("Server overloaded: worker at capacity"),
    ],
)
async def test_rest_of_a_lost_share_is_embedded_by_another_worker(rig, error):
    other = await rig.embedder()
    lose((rig.one, other), error)

    answer = await rig.embed("abc", "de", "f")

    assert vectors(answer) == [[3, 97, 0, 0], [2, 100, 0, 0], [1, 102, 0, 0]]
    assert sorted((rig.one.prompts, other.prompts)) == [["abc", "de"], ["abc", "de", "f"]]


async def test_migrated_embeddings_are_counted(rig):
    lose((rig.one, await rig.embedder()), errors.StreamBroken("gone"))
    await rig.embed("abc", "d")

    found = await rig.metrics()
    name = 'dynamo_frontend_model_migration_total{migration_type="ongoing_request",model="e"}'
    assert found[name] == 1


async def test_embeddings_of_which_two_workers_died_are_sent_to_no_other(rig):
    others = [await rig.embedder() for _ in range(2)]
    lose((rig.one, *others), *[errors.WorkerDied("gone")] * 3)

    answer = await rig.embed("a", "b", "c", "d")

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "suspect_request")
    assert sum(len(worker.calls) for worker in (rig.one, *others)) == 2


async def test_embeddings_migrate_as_often_as_the_limit_says(bare):
    await bare.start(migration_limit=1)
    workers = [await bare.embedder() for _ in range(3)]
    lose(workers, *[errors.StreamBroken("gone")] * 3)

    answer = await bare.embed("a", "b", "c", "d")

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stream_broken")
    assert sum(len(worker.calls) for worker in workers) == 2


async def test_vectors_of_one_answer_are_made_with_the_same_weights(bare):
    await bare.start()
    workers = [await bare.embedder(weights=weights) for weights in ("old", "new")]

    answer = await bare.embed(*("x" * 190 for _ in range(8)))

    assert len(vectors(answer)) == 8
    assert sorted(len(worker.calls) for worker in workers) == [0, 2]


async def test_failed_share_cancels_the_other_shares(rig):
    other = await rig.embedder()
    rig.one.script = lambda call, request: None
    other.script = lambda call, request: call.fail(errors.EngineFailed("no memory"))

    answer = await rig.embed(*("x" * 190 for _ in range(8)))

    assert answer.status_code == 500
    await rig.until(lambda: rig.one.num_cancelled == len(rig.one.calls))


async def test_embedding_requests_are_counted_under_their_endpoint(rig):
    await rig.embed("abc")
    await rig.embed("")

    found = await rig.metrics()
    good = 'endpoint="embeddings",error_type="",model="e",request_type="unary",status="success"'
    assert found[f"dynamo_frontend_requests_total{{{good}}}"] == 1
    assert found['dynamo_frontend_input_sequence_tokens_sum{model="e"}'] == 3
    assert found['dynamo_frontend_inflight_requests{model="e"}'] == 0


async def test_embedding_limits_equal_openais():
    body = json.dumps({"model": "e", "input": ["a"] * embeddings.MAX_INPUTS}).encode()

    assert len(embeddings.API.decode(body).prompts) == 2048


async def test_concurrent_requests_get_their_own_vectors(rig):
    answers = await asyncio.gather(*(rig.embed("x" * n) for n in range(1, 20)))

    assert [vectors(one)[0][0] for one in answers] == list(range(1, 20))


async def test_far_too_many_token_ids_are_refused_before_they_are_looked_at(rig, monkeypatch):
    monkeypatch.setattr(options, "check_ids", None)
    body = {"model": "e", "input": [[1] * 150_001] * 2}
    answer = await rig.client.post("/v1/embeddings", json=body)

    assert answer.status_code == 400
    assert "at most 300000 tokens in all inputs" in answer.json()["error"]["message"]
