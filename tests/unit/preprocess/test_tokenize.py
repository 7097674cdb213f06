"""Encoding gives the ids that tokenizers and sentencepiece give."""

import asyncio
import json
import threading
import tracemalloc

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import waiting
from dynamo.base import errors
from dynamo.preprocess import tokenize, tokenizer_library
from dynamo.protocols import blocks


@given(text=st.text(max_size=60))
def test_ids_equal_those_of_the_library(byte_level, byte_level_json, text):
    judge = tokenizers.Tokenizer.from_str(byte_level_json)
    packed = byte_level.encode_now([text], add_special_tokens=False)[0]

    assert blocks.unpack(packed) == judge.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["The brave cat", "a  cat ", "你好 😀 née", "line\nbreak", ""])
def test_ids_equal_those_of_sentencepiece(sentencepiece_like, sentencepiece_proto, text):
    judge = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_proto)
    packed = sentencepiece_like.encode_now([text], add_special_tokens=False)[0]

    assert blocks.unpack(packed) == judge.encode(text)


def test_special_tokens_are_added_only_on_request(sentencepiece_like):
    bare = blocks.unpack(sentencepiece_like.encode_now(["cat"], add_special_tokens=False)[0])
    full = blocks.unpack(sentencepiece_like.encode_now(["cat"], add_special_tokens=True)[0])

    assert full == [sentencepiece_like.id_of("<s>"), *bare]


def test_special_token_in_the_text_is_encoded_as_itself(byte_level):
    packed = byte_level.encode_now(["<|im_start|>"], add_special_tokens=False)[0]

    assert blocks.unpack(packed) == [byte_level.id_of("<|im_start|>")]


def test_cut_text_keeps_the_special_token_behind_it(byte_level):
    end = byte_level.id_of("<|endoftext|>")

    def cut(ids, num_tokens):
        return blocks.unpack(byte_level.cut_end(blocks.pack(ids), num_tokens))

    assert cut([7, 8, 9, end], 3) == [7, 8, end]
    assert cut([7, 8, 9, 10], 3) == [7, 8, 9]
    assert cut([7, 8, end], 3) == [7, 8, end]


async def test_long_texts_have_the_same_ids_in_a_thread(byte_level):
    texts = ["The quick brown fox. " * (tokenizer_library.FastokensLibrary.long_text // 10), "cat"]
    packed = await byte_level.encode(texts, add_special_tokens=False)

    assert packed == [byte_level.encode_now([text], add_special_tokens=False)[0] for text in texts]


async def test_few_threads_encode_long_texts(byte_level_json):
    """The library keeps megabytes for each thread that has encoded."""
    tokenizer = tokenize.Tokenizer(byte_level_json.encode())
    encode, threads, have_all_come = tokenizer.backend.encode, set(), threading.Event()

    def encode_later(texts, **options):
        threads.add(threading.get_ident())
        have_all_come.wait(waiting.PATIENT_S)
        return encode(texts, **options)

    tokenizer.backend.encode = encode_later
    text = "The quick brown fox. " * (tokenizer.backend.long_text // 10)
    encodings = [tokenizer.encode([text], add_special_tokens=False) for _ in range(6)]
    encoded = asyncio.gather(*encodings)
    await asyncio.sleep(0)
    have_all_come.set()
    await encoded

    assert len(threads) == tokenize.MAX_THREADS
    assert threading.get_ident() not in threads


def test_truncation_and_padding_of_the_file_are_ignored(byte_level_json):
    limited = tokenizers.Tokenizer.from_str(byte_level_json)
    limited.enable_truncation(2)
    limited.enable_padding(length=64)
    ours = tokenize.Tokenizer(limited.to_str().encode())

    assert (
        2 < blocks.count(ours.encode_now(["The quick brown fox"], add_special_tokens=False)[0]) < 64
    )


@pytest.mark.parametrize("definition", [b"", b"{}", b"\xff", b'{"model": {"type": "nope"}}'])
def test_malformed_tokenizer_file_is_refused(definition):
    with pytest.raises(errors.ConfigError, match=r"tokenizer\.json"):
        tokenize.Tokenizer(definition)


def test_ids_reach_from_zero_to_the_highest_added_token(byte_level):
    assert byte_level.num_ids == byte_level.id_of("大丈夫") + 1
    assert byte_level.token_of(byte_level.id_of("<think>")) == "<think>"
    assert byte_level.token_of(byte_level.num_ids) == ""
    assert byte_level.id_of("") is None


def test_loaded_vocabulary_has_no_objects_in_python(byte_level_json):
    """Python took 90 bytes for each token, as much as the library takes for it."""
    definition = json.loads(byte_level_json)
    vocabulary = definition["model"]["vocab"]
    vocabulary |= {f"wordĠnumber{number}": len(vocabulary) + number for number in range(20_000)}
    definition["added_tokens"] = []
    content = json.dumps(definition).encode()
    tokenize.Tokenizer(content)  # which imports what it needs
    tracemalloc.start()
    loaded = tokenize.Tokenizer(content)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert loaded.num_ids == len(vocabulary)
    assert kept_bytes < 20 * loaded.num_ids


@given(texts=st.lists(st.text(max_size=9), max_size=8))
def test_batches_do_not_change_ids(byte_level, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "MAX_BATCH", 12)
        some_at_once = byte_level.encode_now(texts, add_special_tokens=False)

    assert some_at_once == byte_level.encode_now(texts, add_special_tokens=False)
