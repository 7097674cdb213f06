"""reasoning_effort becomes what a template reads, or is refused in a sentence."""

import pytest

from dynamo.base import errors
from dynamo.preprocess import options

QWEN = frozenset({"messages", "enable_thinking"})
DEEPSEEK = frozenset({"messages", "thinking"})
GPT_OSS = frozenset({"messages", "reasoning_effort"})
BOTH = GPT_OSS | QWEN
KIMI_K3 = frozenset({"messages", "thinking", "thinking_effort"})
PLAIN = frozenset({"messages"})


@pytest.mark.parametrize(
    ("asked", "variables", "told"),
    [
        ("none", QWEN, {"enable_thinking": False}),
        ("low", QWEN, {"enable_thinking": True}),
        ("high", DEEPSEEK, {"thinking": True}),
        ("high", GPT_OSS, {"reasoning_effort": "high"}),
        ("none", BOTH, {"enable_thinking": False}),
        ("low", KIMI_K3, {"thinking": True, "thinking_effort": "low"}),
        ("none", KIMI_K3, {"thinking": False}),
        ("xhigh", BOTH, {"enable_thinking": True, "reasoning_effort": "xhigh"}),
    ],
)
def test_effort_sets_the_variables_that_the_template_reads(asked, variables, told):
    found = options.make_effort_args(asked, variables, can_think=True, param="reasoning_effort")

    assert found == told


@pytest.mark.parametrize(
    ("asked", "variables", "can_think", "words"),
    [
        ("none", PLAIN, True, "not to think"),
        ("none", GPT_OSS, True, "not to think"),
    ],
)
def test_effort_is_refused_if_the_template_reads_no_variable_for_it(
    asked, variables, can_think, words
):
    with pytest.raises(errors.InvalidRequest, match=words) as caught:
        options.make_effort_args(asked, variables, can_think=can_think, param="reasoning.effort")

    assert caught.value.param == "reasoning.effort"


def test_effort_is_a_hint_to_a_template_that_cannot_be_told():
    assert options.make_effort_args("low", PLAIN, can_think=True, param="x") == {}


def test_effort_none_is_accepted_by_a_model_that_never_thinks():
    assert options.make_effort_args("none", PLAIN, can_think=False, param="x") == {}
