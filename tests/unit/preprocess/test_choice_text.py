"""The text of one choice, as an engine's outputs come."""

import pytest

from dynamo.preprocess import detokenize
from dynamo.protocols import blocks, generate

EOS = generate.FinishReason.EOS
STOP = generate.FinishReason.STOP
LENGTH = generate.FinishReason.LENGTH


@pytest.fixture(scope="module")
def decoder(byte_level):
    return detokenize.TextDecoder(byte_level)


@pytest.fixture(scope="module")
def ids_of(byte_level):
    return lambda text: tuple(
        blocks.unpack(byte_level.encode_now([text], add_special_tokens=False)[0])
    )


def outputs(token_ids, finish_reason):
    *rest, last = [generate.Output(token_ids=(one,)) for one in token_ids]
    return [*rest, generate.Output(token_ids=last.token_ids, finish_reason=finish_reason)]


def new(decoder, **conditions):
    return detokenize.ChoiceText(decoder.new(), generate.StopConditions(**conditions))


def test_text_comes_token_by_token(decoder, ids_of):
    text = new(decoder)
    pieces = [text.push(output) for output in outputs(ids_of("The 😀 cat"), LENGTH)]

    assert "".join(pieces) == "The 😀 cat"
    assert text.num_tokens == len(ids_of("The 😀 cat"))
    assert blocks.unpack(text.token_ids) == list(ids_of("The 😀 cat"))
    assert text.stop_reason is None


@pytest.mark.parametrize("reason", [EOS, STOP])
def test_token_that_ended_the_choice_is_hidden(decoder, ids_of, reason):
    (last,) = ids_of("!") if len(ids_of("!")) == 1 else ids_of("a")
    text = new(decoder)
    pieces = [text.push(output) for output in outputs((*ids_of("cat"), last), reason)]

    assert "".join(pieces) == "cat"


@pytest.mark.parametrize("ending", [None, LENGTH])
def test_beginning_of_a_stop_string_goes_out_as_stop_strings_pass(decoder, ids_of, ending):
    text = new(decoder, stop=("\n\nHuman",))
    pieces = [text.push(output) for output in outputs(ids_of("<think>\n"), None)]
    text.passes_stops = True
    pieces += [text.push(output) for output in outputs(ids_of("\nHuman"), ending)]

    assert "".join(pieces) == "<think>\n\nHuman"


def test_last_token_before_the_limit_is_shown(decoder, ids_of):
    assert (
        new(decoder).push(generate.Output(token_ids=ids_of("cat"), finish_reason=LENGTH)) == "cat"
    )


def test_incomplete_character_is_replaced_at_the_end(decoder, ids_of):
    half = ids_of("💩")[:1]
    text = new(decoder)

    assert text.push(generate.Output(token_ids=half)) == ""
    assert text.push(generate.Output(token_ids=(), finish_reason=LENGTH)) == "\ufffd"


def test_stop_string_ends_the_text_before_it(decoder, ids_of):
    text, told = new(decoder, stop=("END",)), ""
    for output in outputs(ids_of("the ENEND of it"), LENGTH):
        told += text.push(output)
        if text.stop_reason is not None:
            break

    assert (told, text.stop_reason) == ("the EN", "END")


def test_held_back_characters_are_counted(decoder, ids_of):
    text = new(decoder, stop=("END",))
    text.push(generate.Output(token_ids=ids_of("the EN")))

    assert text.num_held == 2
    assert new(decoder).num_held == 0


def test_held_back_text_comes_with_the_end(decoder, ids_of):
    text = new(decoder, stop=("END",))
    pieces = [text.push(output) for output in outputs(ids_of("the EN"), LENGTH)]

    assert ("".join(pieces), text.stop_reason) == ("the EN", None)


def test_stop_strings_are_ignored_before_min_tokens(decoder, ids_of):
    text = new(decoder, stop=("e",), min_tokens=len(ids_of("the E")))
    pieces = [text.push(output) for output in outputs((*ids_of("the E"), *ids_of("He")), LENGTH)]

    assert ("".join(pieces), text.stop_reason) == ("the EH", "e")
