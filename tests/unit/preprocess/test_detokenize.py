"""Text that comes piece by piece is the text that the tokenizer decodes at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.preprocess import detokenize
from dynamo.protocols import blocks

AWKWARD = [
    "😀",
    "👨‍👩‍👧",
    "👍🏽",
    "你好",
    "e\u0301",
    " ",
    "  ",
    "cat",
    "\n",
    "ß",
    "<think>",
    "大丈夫",
    "▁",
    "\ufffd",
]
TEXT = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=4), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 4), max_size=12)


@pytest.fixture(scope="module")
def decoder(tokenizer):
    return detokenize.TextDecoder(tokenizer)


@pytest.fixture(scope="module")
def byte_decoder(byte_level):
    return detokenize.TextDecoder(byte_level)


def chunks(token_ids, cuts):
    start = 0
    for size in cuts:
        yield token_ids[start : start + size]
        start += size
    yield token_ids[start:]


def push_all(detokenizer, token_ids, cuts=()):
    pieces = [detokenizer.push(tuple(chunk)) for chunk in chunks(token_ids, cuts)]
    return [*pieces, detokenizer.finish()]


def ids_of(tokenizer, text):
    return blocks.unpack(tokenizer.encode_now([text], add_special_tokens=False)[0])


@given(text=TEXT, cuts=CUTS)
def test_pieces_join_to_the_decoded_text(tokenizer, decoder, text, cuts):
    token_ids = ids_of(tokenizer, text)
    pieces = push_all(decoder.new(), token_ids, cuts)

    assert isinstance(decoder.new(), detokenize.TableDetokenizer)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@given(text=TEXT.filter(lambda text: "\ufffd" not in text))
def test_no_character_is_split(tokenizer, decoder, text):
    token_ids = ids_of(tokenizer, text)
    pieces = push_all(decoder.new(), token_ids, [1] * len(token_ids))

    assert "\ufffd" not in "".join(pieces)


@given(data=st.data(), cuts=CUTS)
def test_any_byte_level_ids_join_to_the_decoded_text(byte_level, byte_decoder, data, cuts):
    token_ids = data.draw(st.lists(st.integers(0, byte_level.num_ids + 5), max_size=20))
    for skip in (True, False):
        detokenizer = byte_decoder.new(skip_special_tokens=skip)
        expected = byte_level.decode(token_ids, skip_special_tokens=skip)

        assert "".join(push_all(detokenizer, token_ids, cuts)) == expected


@given(text=TEXT, cuts=CUTS)
def test_window_gives_the_same_text_as_a_table(byte_level, text, cuts):
    token_ids = ids_of(byte_level, text)
    window = detokenize.WindowDetokenizer(byte_level, (), byte_level.special_ids)

    assert "".join(push_all(window, token_ids, cuts)) == text


def test_vocabulary_is_compared_with_the_table_in_rows_of_any_length(tokenizer, monkeypatch):
    monkeypatch.setattr(detokenize, "_ROW_LEN", 7)

    assert isinstance(detokenize.TextDecoder(tokenizer).new(), detokenize.TableDetokenizer)


def test_tokenizer_without_a_table_is_decoded_by_a_window(no_table):
    decoder = detokenize.TextDecoder(no_table)
    token_ids = ids_of(no_table, "The brave cat sleeps")

    assert isinstance(decoder.new(), detokenize.WindowDetokenizer)
    assert "".join(push_all(decoder.new(), token_ids, [1] * 9)) == no_table.decode(
        token_ids, skip_special_tokens=True
    )


def test_window_stays_short_during_incomplete_characters(byte_level):
    half = byte_level.id_of("ð")  # the first byte of an emoji
    window = detokenize.WindowDetokenizer(byte_level, (), byte_level.special_ids)
    pieces = [window.push((half,)) for _ in range(300)]

    assert 200 <= len("".join(pieces)) < 300
    assert len(window._window) < 150


def test_first_bytes_of_a_character_wait_for_the_rest(byte_level, byte_decoder):
    detokenizer = byte_decoder.new()
    emoji = [byte_level.id_of(char) for char in "ðŁĴ©"]  # F0 9F 92 A9, one byte each

    assert [detokenizer.push((one,)) for one in emoji] == ["", "", "", "💩"]


def test_invalid_bytes_are_replaced_once_that_is_certain(byte_level, byte_decoder):
    detokenizer = byte_decoder.new()
    first, letter = byte_level.id_of("ð"), byte_level.id_of("a")

    assert detokenizer.push((first,)) == ""
    assert detokenizer.push((letter,)) == "\ufffda"
    assert detokenizer.push((first,)) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_skipped_unless_requested(byte_level, byte_decoder):
    end = byte_level.id_of("<|im_end|>")

    assert byte_decoder.new().push((end,)) == ""
    assert byte_decoder.new(skip_special_tokens=False).push((end,)) == "<|im_end|>"


def test_added_token_that_is_not_special_is_text(byte_level, byte_decoder):

    assert byte_decoder.new().push((byte_level.id_of("<think>"),)) == "<think>"
    assert byte_decoder.new().push((byte_level.id_of("大丈夫"),)) == "大丈夫"


def test_leading_space_is_kept_after_a_prompt_and_dropped_at_a_beginning(
    sentencepiece_like,
):
    decoder = detokenize.TextDecoder(sentencepiece_like)
    answer = ids_of(sentencepiece_like, "cat sleeps")
    prompt = sentencepiece_like.encode_now(["The brave"], add_special_tokens=True)[0]
    only_bos = sentencepiece_like.encode_now([""], add_special_tokens=True)[0][:4]

    assert "".join(push_all(decoder.new(prompt), answer)) == " cat sleeps"
    assert "".join(push_all(decoder.new(only_bos), answer)) == "cat sleeps"
    assert "".join(push_all(decoder.new(), answer, [1, 1, 1])) == "cat sleeps"


def test_table_takes_a_token_when_it_first_comes(byte_level):
    decoder = detokenize.TextDecoder(byte_level)
    token_ids = ids_of(byte_level, "a brave cat")
    text = decoder.new().push(token_ids)
    taken = [token_id for token_id, piece in enumerate(decoder._visible.pieces) if piece]

    assert text == "a brave cat"
    assert taken == sorted(set(token_ids))


def test_token_has_its_own_text_and_bytes(byte_level, byte_decoder):
    half, end = byte_level.id_of("ð"), byte_level.id_of("<|im_end|>")

    assert (byte_decoder.token_text(half), byte_decoder.token_bytes(half)) == ("\ufffd", b"\xf0")
    assert (byte_decoder.token_text(end), byte_decoder.token_bytes(end)) == (
        "<|im_end|>",
        b"<|im_end|>",
    )
    assert byte_decoder.token_text(byte_level.num_ids + 1) == ""


def test_token_keeps_its_space(sentencepiece_like):
    decoder = detokenize.TextDecoder(sentencepiece_like)
    token_ids = ids_of(sentencepiece_like, "brave cat")

    assert "".join(map(decoder.token_text, token_ids)) == " brave cat"


def test_whole_prompt_is_decoded_with_its_special_tokens(byte_level, byte_decoder):
    text = "<|im_start|>user\nHi 你好<|im_end|>"

    assert byte_decoder.decode(byte_level.encode_now([text], add_special_tokens=False)[0]) == text


@pytest.mark.parametrize("text", ["The cat", "😀"])
def test_unknown_tokens_are_skipped(byte_level, byte_decoder, text):
    detokenizer = byte_decoder.new()
    missing = byte_level.num_ids + 100
    token_ids = [token for one in ids_of(byte_level, text) for token in (missing, one)]

    assert "".join(push_all(detokenizer, token_ids, [1] * 4)) == text


@pytest.mark.parametrize("name", ["byte_level", "no_table"])
def test_shown_marks_are_text_and_other_special_tokens_are_not(request, name):
    tokenizer = request.getfixturevalue(name)
    token_ids = ids_of(tokenizer, "<|im_start|>cat<|im_end|>")
    decoder = detokenize.TextDecoder(tokenizer)
    showing = decoder.showing(("<|im_end|>", "no token"))

    def text(decoder):
        detokenizer = decoder.new()
        return detokenizer.push(token_ids) + detokenizer.finish()

    assert "<|im_end|>" not in text(decoder)
    assert text(showing).replace(" ", "") == "cat<|im_end|>"
    assert decoder.showing(("no token",)) is decoder
