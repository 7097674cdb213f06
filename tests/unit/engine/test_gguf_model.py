"""The model directory of a GGUF file: the same ids as the tokenizers that such files are made from."""

import io
import json

import pytest

pytest.importorskip("gguf", reason="needs gguf (the extra llamacpp)")

import sentencepiece
import tokenizers

import gguf_models
from dynamo.base import errors
from dynamo.engine.adapters.llamacpp import gguf_model
from dynamo.worker import engines, model_source

TEXTS = ["The brave cat", "don't  WE'LL 1234", "你好 😀 née", "line\n\n break\t", "<|im_end|>", ""]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_ids_equal_those_of_the_byte_level_tokenizer_in_the_file(tmp_path):
    judge = tokenizers.Tokenizer.from_file(str(model_source.built_in() / "tokenizer.json"))
    judge.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    model = json.loads(judge.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"]]
    path = gguf_models.write_model(tmp_path / "m.gguf", tokens=tokens, merges=merges)
    directory = model_source.resolve(str(path))
    ours = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    for text in TEXTS[:4]:
        assert ours.decode(ours.encode(text).ids) == text
        words = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert ours.encode(text).ids == [
            token for word in words for token in ours.model.tokenize(word) for token in (token.id,)
        ]
    assert ours.encode("<|im_end|>").ids == [len(tokens) + 1]


@pytest.fixture(scope="module")
def sentencepiece_proto():
    """A model of SentencePiece's BPE, such as Llama 2's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["The brave cat sat. The cat's line, don't break; café née 12345."] * 4
        ),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("text", [*TEXTS[:4], ""])
def test_ids_equal_those_of_sentencepiece(sentencepiece_proto, text):
    judge = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_proto)
    size = judge.get_piece_size()
    kinds = [
        6 if judge.is_byte(n) else 2 if judge.is_unknown(n) else 3 if judge.is_control(n) else 1
        for n in range(size)
    ]
    fields = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [judge.id_to_piece(n) for n in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [judge.get_score(n) for n in range(size)],
        "tokenizer.ggml.unknown_token_id": judge.unk_id(),
        "tokenizer.ggml.bos_token_id": judge.bos_id(),
        "tokenizer.ggml.eos_token_id": judge.eos_id(),
    }
    ours = tokenizers.Tokenizer.from_str(gguf_model.model_files(fields)["tokenizer.json"])

    assert ours.encode(text, add_special_tokens=False).ids == judge.encode(text)
    assert ours.encode(text).ids[0] == judge.bos_id()
    assert ours.decode(judge.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-4o", ["Hello", "World", "Ġdon't", "Ġ", "123", "4", "/Ċ", "eÌģ"]),
        ("llama4", ["Hello", "World", "Ġdon't", "Ġ", "123", "4", "/Ċ", "eÌģ"]),
        ("qwen35", ["HelloWorld", "Ġdon", "'t", "Ġ", "1", "2", "3", "4", "/Ċ", "eÌģ"]),
        ("glm4", ["HelloWorld", "Ġdon", "'t", "Ġ", "123", "4", "/Ċ", "e", "Ìģ"]),
    ],
)
def test_text_is_split_into_words_as_the_file_names_it(name, words):
    fields = {
        "general.architecture": "some",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": gguf_models.byte_letters(),
    }
    ours = tokenizers.Tokenizer.from_str(gguf_model.model_files(fields)["tokenizer.json"])
    text = "HelloWorld don't 1234/\ne\u0301"

    assert [word for word, _ in ours.pre_tokenizer.pre_tokenize_str(text)] == words


def test_directory_has_template_ends_and_sizes_of_the_file(tmp_path):
    path = gguf_models.write_model(tmp_path / "tiny-Q4.gguf", layers=2)
    directory = model_source.resolve(str(path))
    config = json.loads((directory / "config.json").read_text())

    assert (directory / "chat_template.jinja").read_text() == gguf_models.TEMPLATE
    assert config["eos_token_id"] == [258]
    assert (config["vocab_size"], config["max_position_embeddings"]) == (259, 512)
    assert config["kv_bytes_per_token"] == 2 * 2 * (16 + 16) * 2  # layers, heads, keys and values
    assert (directory / "model.gguf").resolve() == path
    assert model_source.display_name(str(path)) == "tiny-Q4"
    assert model_source.resolve(str(path)) == directory


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], [2, 3, 4]),  # gpt-oss
        (["<|end|>", "<|endoftext|>"], [1, 2]),  # Phi
    ],
)
def test_end_of_a_message_is_no_end_of_the_answer_where_thoughts_are_messages(special, ends):
    fields = {
        "general.architecture": "some",
        "tokenizer.ggml.tokens": ["a", *special],
        "tokenizer.ggml.token_type": [1] + [3] * len(special),
        "tokenizer.ggml.eos_token_id": ends[0],
    }
    config = json.loads(gguf_model.model_files(fields, has_tokenizer=True)["config.json"])

    assert config["eos_token_id"] == ends


def test_tokenizer_beside_the_file_replaces_its_own(tmp_path):
    path = gguf_models.write_model(tmp_path / "m.gguf", pre="of nobody")
    with pytest.raises(
        errors.ConfigError, match=r"'of nobody'.*put the model's tokenizer.json beside"
    ):
        model_source.resolve(str(path))
    own = (model_source.built_in() / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(own)

    assert (model_source.resolve(str(path)) / "tokenizer.json").read_bytes() == own


def test_template_for_tools_in_the_file_is_read_unless_a_template_lies_beside_it(tmp_path):
    named = {"default": "plain", "tool_use": "<tool_call>"}
    templates = [{"name": name, "template": text} for name, text in named.items()]
    path = str(gguf_models.write_model(tmp_path / "m.gguf", template=templates))
    with_tools = "additional_chat_templates/tool_use.jinja"

    assert (model_source.resolve(path) / "chat_template.jinja").read_text() == "plain"
    assert (model_source.resolve(path) / with_tools).read_text() == "<tool_call>"

    (tmp_path / "chat_template.jinja").write_text("own")

    assert (model_source.resolve(path) / "chat_template.jinja").read_text() == "own"
    assert not (model_source.resolve(path) / with_tools).exists()


def test_template_for_tools_beside_the_file_is_copied(tmp_path):
    path = gguf_models.write_model(tmp_path / "m.gguf")
    name = "additional_chat_templates/tool_use.jinja"
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("<tool_call>")

    assert (model_source.resolve(str(path)) / name).read_text() == "<tool_call>"


def test_model_in_parts_keeps_the_name_by_which_its_parts_are_found(tmp_path):
    gguf_models.write_model(tmp_path / "m.gguf", part_tensors=6)
    for part in sorted(tmp_path.glob("m-*.gguf")):  # as in the hub's cache
        blob = part.rename(tmp_path / f"blob of {part.stem}")
        part.symlink_to(blob)
    first = tmp_path / "m-00001-of-00003.gguf"

    assert (model_source.resolve(str(first)) / "model.gguf").readlink() == first
    with pytest.raises(errors.ConfigError, match=r"of a model in parts, name the first"):
        model_source.resolve(str(tmp_path / "m-00002-of-00003.gguf"))


def test_file_that_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"no model")

    with pytest.raises(errors.ConfigError, match=r"m.gguf: expected a GGUF file"):
        model_source.resolve(str(tmp_path / "m.gguf"))


def test_gguf_file_is_for_llamacpp_alone_and_its_default(tmp_path):
    path = str(gguf_models.write_model(tmp_path / "m.gguf"))

    assert (engines.default_for(path), engines.default_for("org/model")) == ("llamacpp", "native")
    with pytest.raises(errors.ConfigError, match=r"serve it with python -m dynamo.llamacpp"):
        engines.find_model("native", path)
    with pytest.raises(
        errors.ConfigError, match=r"expected --model FILE.gguf, got the built-in model"
    ):
        engines.find_model("llamacpp", None)
