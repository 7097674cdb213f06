"""The two tokenizer libraries give the same ids and texts, or the reference is used."""

import json
import logging
import time
from concurrent import futures

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.preprocess import tokenize, tokenizer_library

# How the tokenizers of Qwen 2.5 and of GPT-4o split a text into words.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str, byte_level_json: str, **more: object) -> str:
    """Return the definition with words that this pattern splits, and more parts."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split, letters | {"use_regex": False}]
    definition = json.loads(byte_level_json) | more
    return json.dumps(definition | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})


@pytest.fixture(scope="module", params=["qwen", "gpt-4o", "normalized"])
def definition(request, byte_level_json) -> str:
    if request.param == "normalized":
        return split_by(QWEN, byte_level_json, normalizer={"type": "NFC"})
    return split_by({"qwen": QWEN, "gpt-4o": GPT_4O}[request.param], byte_level_json)


@pytest.fixture(scope="module")
def both(definition) -> tuple[tokenizer_library.Library, tokenizer_library.Library]:
    reference = tokenizer_library.HuggingFaceLibrary(definition)
    return tokenizer_library.FastokensLibrary(definition), reference


@given(texts=st.lists(st.text(max_size=80), max_size=3), add=st.booleans())
def test_fastokens_gives_the_ids_of_the_reference(both, texts, add):
    fast, reference = both

    assert fast.encode(texts, add_special_tokens=add) == reference.encode(
        texts, add_special_tokens=add
    )


@given(data=st.data(), skip=st.booleans())
def test_fastokens_gives_the_texts_of_the_reference(both, data, skip):
    fast, reference = both
    token_ids = data.draw(st.lists(st.integers(0, 700), max_size=20))

    assert fast.decode(token_ids, skip_special_tokens=skip) == reference.decode(
        token_ids, skip_special_tokens=skip
    )


def test_fastokens_spells_the_tokens_of_the_reference(both):
    fast, reference = both
    tokens = reference.vocabulary().tokens

    assert [fast.token_of(token_id) for token_id in range(len(tokens) + 1)] == [*tokens, ""]
    assert [fast.id_of(token) for token in tokens] == [reference.id_of(token) for token in tokens]


def test_fastokens_is_used_where_it_is_equal(byte_level):
    assert isinstance(byte_level.backend, tokenizer_library.FastokensLibrary)


def test_reference_is_used_where_fastokens_cannot_read_the_definition(sentencepiece_like):
    assert isinstance(sentencepiece_like.backend, tokenizer_library.HuggingFaceLibrary)


def test_reference_is_used_on_request(byte_level_json):
    ours = tokenize.Tokenizer(byte_level_json.encode(), tokenize.TokenizerOptions("default"))

    assert isinstance(ours.backend, tokenizer_library.HuggingFaceLibrary)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("encode", [b"\0\0\0\0"] * tokenizer_library.NUM_PROBES),
        ("decode", "wrong"),
        ("token_of", "wrong"),
    ],
)
def test_reference_is_used_where_fastokens_differs(
    byte_level_json, monkeypatch, caplog, method, wrong
):
    monkeypatch.setattr(tokenizer_library.FastokensLibrary, method, lambda *_, **__: wrong)
    with caplog.at_level(logging.INFO):
        ours = tokenize.Tokenizer(byte_level_json.encode())

    assert isinstance(ours.backend, tokenizer_library.HuggingFaceLibrary)
    assert "gives other tokens or texts" in caplog.text


def test_first_text_after_the_load_does_not_wait_for_a_table_of_the_vocabulary(byte_level_json):
    """The event loop stood still for 160 ms with a vocabulary of this size."""
    definition = json.loads(byte_level_json)
    vocabulary = definition["model"]["vocab"]
    vocabulary |= {f"number{number}": len(vocabulary) + number for number in range(100_000)}
    definition["added_tokens"] = []
    content = json.dumps(definition)

    def share_of_first_text():
        with futures.ThreadPoolExecutor(1) as loader:
            began_s = time.process_time()
            library = loader.submit(tokenizer_library.FastokensLibrary, content).result()
            load_s = time.process_time() - began_s
        began_s = time.thread_time()
        library.encode(["cat"], add_special_tokens=False)
        return (time.thread_time() - began_s) / load_s

    # other work on the machine only adds to one of them
    assert min(share_of_first_text() for _ in range(3)) < 1 / 10


@pytest.mark.parametrize("kind", ["HuggingFaceLibrary", "FastokensLibrary"])
def test_half_a_surrogate_pair_is_refused(byte_level_json, kind):
    library = getattr(tokenizer_library, kind)(byte_level_json)

    with pytest.raises(errors.InvalidRequest, match="expected a text"):
        library.encode(["\ud83d"], add_special_tokens=False)


def test_text_that_a_pattern_cannot_split_is_refused(byte_level_json):
    fast = tokenizer_library.FastokensLibrary(split_by("(?:a+)+b|\\S+|\\s+", byte_level_json))

    with pytest.raises(errors.InvalidRequest, match="can split into words"):
        fast.encode(["a" * 40 + "c"], add_special_tokens=False)
