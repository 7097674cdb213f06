"""Prompts cut at special tokens have the same ids as uncut ones; the cache is bounded."""

import functools
import itertools
import re
from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from dynamo.preprocess import tokenize, tokenizer_library
from dynamo.protocols import blocks

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "大丈夫")
PARTS = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "start|>", "cat", " ", "\n"]) | st.text(max_size=20)
)


def filled(texts):
    return "filler " * 80 + "".join(texts)  # long enough to be cut


def run(work):
    with pytest.raises(StopIteration) as done:
        work.send(None)
    return done.value.value


@given(parts=PARTS)
def test_cut_prompt_has_the_ids_of_the_whole(byte_level, parts):
    text = filled(parts)
    (whole,) = byte_level.encode_now([text], add_special_tokens=False)

    assert run(byte_level.encode_prompt(text)) == whole
    assert run(byte_level.encode_prompt(text)) == whole  # from the cache


@given(parts=st.lists(st.sampled_from(["<s>", "</s>", "cat", " "]) | st.text(max_size=20)))
def test_tokenizer_that_treats_beginnings_specially_is_not_cut(sentencepiece_like, parts):
    text = filled(parts)
    (whole,) = sentencepiece_like.encode_now([text], add_special_tokens=False)

    assert run(sentencepiece_like.encode_prompt(text)) == whole


@given(
    tokens=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, unique=True),
    text=st.text("ab<"),
)
def test_segments_joined_are_the_text(tokens, text):
    cut = tokenize.PromptCutter(tokens).cut(text)

    assert "".join(cut) == text
    assert "" not in cut


@given(
    tokens=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1),
    text=st.text("ab<"),
)
def test_text_is_cut_at_the_longest_token_of_each_place(tokens, text):
    longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))

    expected = [part for part in re.split(f"({longest_first})", text) if part]
    assert tokenize.PromptCutter(tokens).cut(text) == expected


def test_beginning_that_many_tokens_have_is_looked_for_once():
    cutter = tokenize.PromptCutter([f"<reserved_{number}>" for number in range(1000)])

    assert cutter._cut.__self__.pattern.count("reserved") == 1


def test_longest_of_tokens_with_equal_beginnings_is_cut_out():
    assert tokenize.PromptCutter(["<a>", "<a><b>"]).cut("x<a><b><a>") == ["x", "<a><b>", "<a>"]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_absorb_neighbours_forbid_cutting(byte_level_json, flag):
    made = tokenizers.Tokenizer.from_str(byte_level_json)
    made.add_special_tokens([tokenizers.AddedToken("<|eater|>", normalized=False, **{flag: True})])
    counted = Count()
    ours = tokenize.Tokenizer(made.to_str().encode(), cache_observer=counted)
    text = filled(["cat <|eater|> cat<|im_end|>\n"])

    assert run(ours.encode_prompt(text)) == ours.encode_now([text], add_special_tokens=False)[0]
    assert counted.calls == []


WORDS = {
    "gpt2": None,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-oss": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def with_words(definition: str, pattern: str | None) -> tokenize.Tokenizer:
    made = tokenizers.Tokenizer.from_str(definition)
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenize.Tokenizer(made.to_str().encode())


@pytest.mark.parametrize("name", WORDS)
@given(
    texts=st.lists(st.text(max_size=20) | st.text(" \n\r\t'./é\u0301好1", max_size=6)),
    letters=st.text("aZst", min_size=1),
)
def test_long_segments_cut_at_lines_have_the_ids_of_the_whole(
    byte_level_json, name, texts, letters
):
    ours = remember(with_words, byte_level_json, WORDS[name])
    joined = "".join(f"{text}\n{letter}" for text, letter in zip(texts, itertools.cycle(letters)))
    text = filled([joined])
    with mock.patch.object(tokenize, "PART_CHARS", 1):
        cut = ours._cutter.cut(text)
        packed = run(ours.encode_prompt(text))

    assert len(cut) > len(texts)
    assert packed == ours.encode_now([text], add_special_tokens=False)[0]


remember = functools.cache(lambda make, *arguments: make(*arguments))


@pytest.mark.parametrize(
    "pattern",
    [
        r"\s*\p{L}+|\s+|[^\s\p{L}]+",  # line ends belong to the word that follows
        r"[^ ]+| ",
        r"[^\n]+\n[a-z]?|\n",
        r"(?:'\na)|\p{L}+|\s+|[^\s\p{L}]+",  # only after an apostrophe
    ],
)
async def test_tokenizer_with_words_over_line_ends_is_not_cut_at_lines(byte_level_json, pattern):
    ours = with_words(byte_level_json, pattern)
    text = "a cat\nand '\na fox\n" * tokenize.PART_CHARS

    packed = await ours.encode_prompt(text)

    assert packed == ours.encode_now([text], add_special_tokens=False)[0]
    assert ours._cutter.cut(text) == [text]


@pytest.mark.parametrize(
    "step",
    [normalizers.Replace("\n", " "), normalizers.Prepend("_"), normalizers.Strip()],
)
async def test_normalizer_that_depends_on_line_ends_forbids_cutting_at_lines(byte_level_json, step):
    made = tokenizers.Tokenizer.from_str(byte_level_json)
    made.normalizer = normalizers.Sequence([normalizers.NFC(), step])
    ours = tokenize.Tokenizer(made.to_str().encode())
    text = "a cat\nand a fox\n" * tokenize.PART_CHARS
    packed = await ours.encode_prompt(text)

    assert packed == ours.encode_now([text], add_special_tokens=False)[0]


def test_texts_with_equal_beginnings_share_their_parts():
    text = "".join(f"line number {number}\n" for number in range(1000))
    longer = [*tokenize.split_segment(text + "more")]

    assert longer[:-1] == [*tokenize.split_segment(text)][:-1]
    assert "".join(longer) == text + "more"
    assert min(map(len, longer[:-1])) >= tokenize.PART_CHARS


def test_least_recently_used_segment_is_dropped():
    size = tokenize.SegmentCache({}, max_bytes=1 << 20)
    size.put("a", b"1")
    cache = tokenize.SegmentCache({"<s>": b"0"}, max_bytes=4 * size.num_bytes)
    for name in "abcd":
        cache.put(name, b"1")
    cache.find("a")
    cache.put("e", b"1")

    assert cache.find("b") is None
    assert all(cache.find(name) == b"1" for name in "acde")
    assert cache.find("<s>") == b"0"
    assert cache.num_bytes == 4 * size.num_bytes


def test_segment_that_would_displace_most_others_is_not_cached():
    cache = tokenize.SegmentCache({}, max_bytes=4096)
    cache.put("a", b"1")
    cache.put("b" * 2000, b"2")

    assert cache.find("b" * 2000) is None
    assert cache.find("a") == b"1"


class Count:
    def __init__(self):
        self.calls = []

    def record_lookup(self, **numbers):
        self.calls.append(numbers)


def test_segments_and_tokens_are_counted(byte_level_json):
    counted = Count()
    ours = tokenize.Tokenizer(byte_level_json.encode(), cache_observer=counted)
    first, again = (
        filled(["<|im_end|>", question, "<|im_end|>"]) for question in ("a cat", "a fox")
    )
    count = functools.partial(ours.encode_now, add_special_tokens=False)
    run(ours.encode_prompt(first))
    run(ours.encode_prompt(again))
    (whole, question) = map(blocks.count, count([again, "a fox"]))

    assert counted.calls[0]["hits"] == 2  # the two special tokens
    assert counted.calls[1] == {
        "hits": 3,
        "misses": 1,
        "cached_tokens": whole - question,
        "uncached_tokens": question,
    }


async def test_long_new_segments_have_the_same_ids_in_a_thread(byte_level):
    text = filled(
        [
            "<|im_start|>",
            "long " * tokenizer_library.FastokensLibrary.long_text,
            "<|im_end|>",
            "x" * 5000,
        ]
    )

    packed = await byte_level.encode_prompt(text)

    assert packed == byte_level.encode_now([text], add_special_tokens=False)[0]


def test_prompt_of_tokens_alone_is_cut_into_few_segments(byte_level):
    text = "<|im_end|>" * (2 * tokenize.MAX_CUTS) + "cat"
    cut = byte_level._cutter.cut(text)
    (whole,) = byte_level.encode_now([text], add_special_tokens=False)

    assert "".join(cut) == text
    assert len(cut) <= tokenize.MAX_CUTS + 1
    assert b"".join(byte_level._encode(segment) for segment in cut) == whole
