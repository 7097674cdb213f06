"""Log probabilities keep pace with the text they belong to."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.delivery import choices
from dynamo.preprocess import detokenize
from dynamo.protocols import generate


class Bytes:
    """A detokenizer whose tokens are ASCII."""

    def push(self, token_ids):
        return bytes(token_ids).decode()

    def finish(self):
        return ""


def choice(*stops, min_tokens=0, has_logprobs=True):
    conditions = generate.StopConditions(stop=stops, min_tokens=min_tokens)
    return choices.Choice(0, detokenize.ChoiceText(Bytes(), conditions), has_logprobs=has_logprobs)


def said(text, reason=None):
    logprobs = tuple(generate.TokenLogprobs(-float(byte)) for byte in text.encode())
    return generate.Output(tuple(text.encode()), reason, logprobs=logprobs)


def told(reports):
    return "".join(chr(report.token_id) for report in reports)


class Utf8(Bytes):
    """A detokenizer whose tokens are bytes of UTF-8."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids):
        return self._decoder.decode(bytes(token_ids))

    def finish(self):
        return self._decoder.decode(b"", True)


@pytest.mark.parametrize("num_together", [1, 2, 9])
@pytest.mark.parametrize(
    ("ending", "expected"), [("\u20ac", b"a\xc3\xa9"), ("", b"a\xc3\xa9\xe2\x82\xac")]
)
def test_tokens_of_a_character_are_reported_with_it_or_hidden_with_it(
    num_together, ending, expected
):
    conditions = generate.StopConditions(stop=(ending,) if ending else ())
    one = choices.Choice(0, detokenize.ChoiceText(Utf8(), conditions), has_logprobs=True)
    data, reported = "a\u00e9\u20ac".encode(), b""
    for at in range(0, len(data), num_together):
        part = data[at : at + num_together]
        reason = generate.FinishReason.LENGTH if at + num_together >= len(data) else None
        logprobs = tuple(generate.TokenLogprobs(-1.0) for _ in part)
        text, reports = one.read(generate.Output(tuple(part), reason, logprobs=logprobs))
        reported += bytes(report.token_id for report in reports)
        assert bool(text) == bool(reports)

    assert reported == expected


def test_without_stop_strings_each_token_is_reported_with_its_text():
    one = choice()
    text, reports = one.read(said("ab"))

    assert (text, told(reports)) == ("ab", "ab")
    assert [report.start for report in reports] == [0, 1]
    assert [report.logprobs.logprob for report in reports] == [-97, -98]


def test_held_back_token_is_reported_with_its_text():
    one = choice("bcd")
    first = one.read(said("ab"))
    second = one.read(said("ce"))

    assert (first[0], told(first[1])) == ("a", "a")
    assert (second[0], told(second[1])) == ("bce", "bce")
    assert [report.start for report in second[1]] == [1, 2, 3]


def test_token_that_ended_the_choice_is_not_delivered():
    one = choice()
    text, reports = one.read(said("abZ", generate.FinishReason.EOS))

    assert (text, told(reports)) == ("ab", "ab")
    assert one.is_over
    assert one.text.num_tokens == 3


def test_last_token_before_the_length_limit_is_delivered():
    text, reports = choice().read(said("abZ", generate.FinishReason.LENGTH))

    assert (text, told(reports)) == ("abZ", "abZ")


def test_held_back_text_is_delivered_at_the_end():
    one = choice("bcd")
    one.read(said("ab"))
    text, reports = one.read(said("c", generate.FinishReason.LENGTH))

    assert (text, told(reports)) == ("bc", "bc")


def test_choice_without_logprobs_has_no_token_reports():
    text, reports = choice().read(generate.Output(tuple(b"ab")))

    assert (text, reports) == ("ab", [])


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_stop_string_ends_the_choice(has_logprobs):
    one = choice("b", has_logprobs=has_logprobs)
    text, _ = one.read(said("abc"))

    assert text == "a"
    assert one.finish_reason is generate.FinishReason.STOP


@given(
    st.text("abcX", max_size=20),
    st.lists(st.text("abX", min_size=1, max_size=3), max_size=2),
    st.data(),
)
def test_logprobs_do_not_change_the_text(text, stops, data):
    plain, reporting = choice(*stops, has_logprobs=False), choice(*stops)
    got, spelled, at = ["", ""], "", 0
    while at < len(text) and not plain.is_over:
        step = data.draw(st.integers(1, 5))
        reason = generate.FinishReason.LENGTH if at + step >= len(text) else None
        output = said(text[at : at + step], reason)
        got[0] += plain.read(output)[0]
        more, reports = reporting.read(output)
        got[1] += more
        spelled += told(reports)
        at += step

    assert got[0] == got[1] == spelled
    assert plain.finish_reason == reporting.finish_reason


def test_tokens_without_a_text_are_not_looked_at_again_with_each_that_follows():
    class Pending(list):
        num_looks = 0

        def __iter__(self):
            for each in super().__iter__():
                Pending.num_looks += 1
                yield each

    class Silent(Bytes):
        def push(self, token_ids):
            del token_ids
            return ""

    text = detokenize.ChoiceText(Silent(), generate.StopConditions())
    one = choices.Choice(0, text, has_logprobs=True)
    one.reporter._pending = Pending()
    reported = [one.read(said("a"))[1] for _ in range(1000)]

    assert not any(reported)
    assert Pending.num_looks <= 1000
    assert len(one.read(said("b", generate.FinishReason.LENGTH))[1]) == 1001
