"""reasoning_effort becomes what a template reads, or is refused in a sentence."""

import pytest

from dynamo.base import errors
from dynamo.preprocess import thinking

QWEN = frozenset({"messages", "enable_thinking"})
DEEPSEEK = frozenset({"messages", "thinking"})
GPT_OSS = frozenset({"messages", "reasoning_effort"})
BOTH = GPT_OSS | QWEN
PLAIN = frozenset({"messages"})


@pytest.mark.parametrize(
    ("asked", "variables", "told"),
    [
        ("none", QWEN, {"enable_thinking": False}),
        ("low", QWEN, {"enable_thinking": True}),
        ("high", DEEPSEEK, {"thinking": True}),
        ("high", GPT_OSS, {"reasoning_effort": "high"}),
        ("none", BOTH, {"enable_thinking": False}),
        ("xhigh", BOTH, {"enable_thinking": True, "reasoning_effort": "xhigh"}),
    ],
)
def test_a_template_is_told_what_it_reads(asked, variables, told):
    found = thinking.make_template_args(asked, variables, can_think=True, param="reasoning_effort")

    assert found == told


@pytest.mark.parametrize(
    ("asked", "variables", "can_think", "words"),
    [
        ("low", PLAIN, False, "how hard to think"),
        ("low", PLAIN, True, "how hard to think"),
        ("none", PLAIN, True, "not to think"),
        ("none", GPT_OSS, True, "not to think"),
    ],
)
def test_a_template_that_cannot_be_told_is_an_error(asked, variables, can_think, words):
    with pytest.raises(errors.InvalidRequest, match=words) as caught:
        thinking.make_template_args(asked, variables, can_think=can_think, param="reasoning.effort")

    assert caught.value.param == "reasoning.effort"


def test_who_never_thinks_may_be_asked_not_to():
    assert thinking.make_template_args("none", PLAIN, can_think=False, param="x") == {}
