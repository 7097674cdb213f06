"""Prompts are those of transformers' apply_chat_template."""

import itertools

import chat_templates
import pytest
import tokenizers
import transformers

pytestmark = pytest.mark.reference

SYSTEM = {"role": "system", "content": " You are <terse> & kind. "}
USER = {"role": "user", "content": 'What is "the weather" in Besançon?\n  <b>'}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nLet me look. "}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Besançon", "n": [1, None]}},
}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"temp": 3}'}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <the> weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, USER],
    [USER, CALLING, RESULT],
]
FAMILIES = {
    "chatml": (chat_templates.CHATML, CONVERSATIONS),
    "llama3": (chat_templates.LLAMA_3, CONVERSATIONS),
    "mistral": (chat_templates.MISTRAL, CONVERSATIONS[:3]),
}
CASES = [
    (family, conversation, tools, add_generation_prompt)
    for family, (_, conversations) in FAMILIES.items()
    for conversation, tools, add_generation_prompt in itertools.product(
        conversations, (None, [TOOL]), (True, False)
    )
]


@pytest.fixture(scope="module")
def judge(byte_level_json):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(byte_level_json),
        bos_token="<s>",
        eos_token="</s>",
    )


@pytest.mark.parametrize(("family", "conversation", "tools", "add_generation_prompt"), CASES)
def test_prompt(judge, family, conversation, tools, add_generation_prompt):
    source, _ = FAMILIES[family]
    args = {"date_string": "26 Jul 2024", "enable_thinking": False}
    expected = judge.apply_chat_template(
        conversation,
        chat_template=source,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **args,
    )

    assert expected == chat_templates.rendered(
        source, conversation, tools=tools, add_generation_prompt=add_generation_prompt, args=args
    )
