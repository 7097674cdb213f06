"""Prompt and suffix become one text, for models that were trained to write what is between."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.frontend.apis import completions as openai_completions
from dynamo.preprocess import infill


def completion(prompt="a {b}", **fields):
    return openai_completions.decode(
        msgspec.json.encode({"model": "m", "prompt": prompt, **fields})
    )


def join(request, name):
    return infill.join_prompts(request.prompts, request.suffix, name, request.model)


@pytest.mark.parametrize("name", infill.FORMATS)
def test_prompt_and_suffix_are_in_the_text_unchanged(name):
    (text,) = join(completion(suffix="{c} d"), name)

    assert text.count("a {b}") == text.count("{c} d") == 1


def test_each_prompt_has_the_suffix():
    found = join(completion(["a", "b"], suffix="z"), "starcoder")

    assert found == [
        "<fim_prefix>a<fim_suffix>z<fim_middle>",
        "<fim_prefix>b<fim_suffix>z<fim_middle>",
    ]


@pytest.mark.parametrize("suffix", [None, ""])
@pytest.mark.parametrize("name", [None, "none", "qwen"])
def test_prompt_without_a_suffix_is_unchanged(name, suffix):
    assert join(completion(suffix=suffix), name) == ["a {b}"]


@pytest.mark.parametrize(
    ("prompt", "name", "words"),
    [("a", None, "--dyn-infill-format"), ("a", "none", "not known to"), ([1], "qwen", "token ids")],
)
def test_error_for_an_unsupported_infill_names_the_suffix(prompt, name, words):
    with pytest.raises(errors.InvalidRequest, match=words) as caught:
        join(completion(prompt, suffix="z"), name)

    assert caught.value.param == "suffix"


def test_unknown_infill_format_is_refused_with_the_known_formats():
    infill.check("none")
    with pytest.raises(errors.ConfigError, match=r"expected one of codegemma, .*'zzz'"):
        infill.check("zzz")
