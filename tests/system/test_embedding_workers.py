"""Vectors from real workers, through the official client."""

import json
import signal

import httpx
import openai
import pytest
import tokenizers
from deployment import MODEL
from tokenizers import models, pre_tokenizers, processors

import checkpoints
from waiting import PATIENT_S, eventually


@pytest.fixture
def encoder(tmp_path):
    """A BERT with random weights, and a tokenizer that wraps a text in [CLS] and [SEP]."""
    directory = checkpoints.make_encoder(tmp_path / "tiny-bert", "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "sat", "ran"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_encoder_serves_embeddings_beside_a_chat_model(deployment, encoder):
    worker = deployment.native("--model", str(encoder))
    deployment.mocker()
    frontend = deployment.frontend()
    frontend.others.append(worker)
    frontend.await_models([MODEL, "tiny-bert"])
    texts = ["a cat sat", "a dog ran", "a cat sat", "a cat sat " * 10]

    with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model="tiny-bert", input=texts)
        alone = client.embeddings.create(model="tiny-bert", input=texts[0], encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="'storyteller' makes no embeddings"):
            client.embeddings.create(model=MODEL, input="a")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 130 tokens"):
            client.embeddings.create(model="tiny-bert", input="a " * 129)

    vectors = [one.embedding for one in found.data]
    assert found.usage.prompt_tokens == 5 + 5 + 5 + 32  # nothing is cut, nothing is padded
    assert dot(vectors[0], vectors[0]) == pytest.approx(1, abs=1e-5)
    assert vectors[0] == pytest.approx(alone.data[0].embedding, abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5)
    assert dot(vectors[0], vectors[1]) < 0.999
    assert frontend.chat().status_code == 200


def test_any_model_embeds_with_the_task_flag_and_ends_on_sigterm(deployment):
    worker = deployment.native("--task", "embed", "--model-name", "vectors")
    frontend = deployment.frontend()
    frontend.others.append(worker)
    frontend.await_models(["vectors"])

    body = {"model": "vectors", "input": ["one", "two words", "three more words"]}
    answer = httpx.post(f"{frontend.url}/v1/embeddings", json=body, timeout=PATIENT_S)
    assert [len(one["embedding"]) for one in answer.json()["data"]] == [256] * 3
    assert worker.metric("requests_total") == 1
    sent_bytes = worker.metric("response_bytes_total")
    assert frontend.metric("dynamo_transport_tcp_bytes_received_total") >= sent_bytes > 1000

    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert "Traceback" not in worker.log.read_text()


def test_large_request_is_divided_among_two_workers(deployment):
    flags = ("--task", "embed", "--model-name", "e", "--embedding-dimensions", "16")
    workers = [deployment.mocker(*flags) for _ in range(2)]
    frontend = deployment.frontend()
    frontend.others.extend(workers)
    frontend.await_models(["e"])

    def shared():
        body = {"model": "e", "input": [f"{n} " * 50 for n in range(100)], "dimensions": 8}
        answer = httpx.post(f"{frontend.url}/v1/embeddings", json=body, timeout=PATIENT_S)
        vectors = [json.dumps(one["embedding"]) for one in answer.json()["data"]]
        assert len(set(vectors)) == 100
        return all(worker.metric("requests_total") for worker in workers)

    eventually(shared, what="both workers were asked")
