"""The chat template of the built-in model."""

import json
import pathlib

from training.storyteller.grammar.messages import Conversation, Message
from training.storyteller.render import TEMPLATE_PATH, render

PRODUCT = pathlib.Path(__file__).parents[3] / "src/dynamo/engine/native/storyteller"
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
ASKED = Message("user", "Hi")


def test_turns_are_rendered_with_the_prompt_for_the_next_turn():
    conversation = Conversation(
        (Message("system", "Be kind."), ASKED, Message("assistant", "Hello!"), ASKED)
    )

    assert render(conversation, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_system_message_requests_thinking():
    text = render(Conversation((ASKED,), enable_thinking=True), add_generation_prompt=True)

    assert text.startswith("<|im_start|>system\nThink before you answer.<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\n")


def test_prompt_contains_only_thoughts_after_the_last_question():
    answer = Message("assistant", "Hello!", "A greeting.")
    text = render(Conversation((ASKED, answer, ASKED, answer), enable_thinking=True))

    assert text.count("<think>\nA greeting.\n</think>\n\nHello!") == 1
    assert text.index("<think>") > text.rindex("<|im_start|>user")


def test_tools_with_their_calls_and_results_are_rendered():
    call = Message(
        "assistant", "", tool_calls=({"name": "get_time", "arguments": {"city": "Rome"}},)
    )
    conversation = Conversation((ASKED, call, Message("tool", "12:00")), tools=(TOOL,))
    text = render(conversation)

    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert (
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
    ) in text


def test_plain_text_is_rendered_without_turns():
    assert render(Conversation(text="Once upon a time")) == "Once upon a time"


def test_shipped_template_equals_the_one_used_in_training():
    config = json.loads((PRODUCT / "tokenizer_config.json").read_text())

    assert config["chat_template"] == TEMPLATE_PATH.read_text()


def test_model_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in PRODUCT.iterdir()) <= 10_000_000
