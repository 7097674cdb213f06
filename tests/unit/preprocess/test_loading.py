"""Loading a preprocessor: the files of a model, and what each defines."""

import hashlib
import json
import os

import chat_templates
import pytest

from dynamo.base import errors
from dynamo.frontend.apis import chat as openai_chat
from dynamo.preprocess import loading
from dynamo.preprocess.parsers import formats
from dynamo.protocols import generate, model_card
from dynamo.testing import clock

HELLO = openai_chat.ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}])


@pytest.fixture
def model(tmp_path, byte_level_json):
    (tmp_path / "tokenizer.json").write_text(byte_level_json)
    return tmp_path


def write(model, name, **content):
    (model / name).write_text(json.dumps(content))


def load(model, **told):
    card = model_card.ModelCard(
        display_name="tiny",
        source_path=str(model),
        context_length=64,
        kv_cache_block_size=16,
        runtime_config=model_card.ModelRuntimeConfig(**told),
    )
    return loading.load_preprocessor(card, clock.VirtualClock())


async def prompt_of(model, request=HELLO):
    return (await load(model).prepare_conversation(request, "r")).prompt


def test_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"expected a tokenizer\.json"):
        load(tmp_path)


async def test_model_without_a_template_refuses_chat(model):
    with pytest.raises(errors.InvalidRequest, match="no chat template; use /v1/completions"):
        await load(model).prepare_conversation(HELLO, "r")


async def test_template_in_the_tokenizer_config_is_used(model):
    write(model, "tokenizer_config.json", chat_template=chat_templates.CHATML)

    assert (await prompt_of(model)).startswith("<|im_start|>user\nHi")


async def test_template_file_overrides_the_tokenizer_config(model):
    write(model, "tokenizer_config.json", chat_template="a")
    write(model, "chat_template.json", chat_template="b")

    assert await prompt_of(model) == "b"

    (model / "chat_template.jinja").write_text("c")

    assert await prompt_of(model) == "c"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "off:low"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "on:low"),
        ({"reasoning_effort": "high"}, "on:high"),
    ],
)
async def test_request_overrides_the_variables_that_the_card_has_for_the_template(
    model, fields, expected
):
    source = "{{ 'on' if enable_thinking else 'off' }}:{{ reasoning_effort }}"
    write(model, "tokenizer_config.json", chat_template=source)
    preparer = load(model, template_defaults={"enable_thinking": False, "reasoning_effort": "low"})
    request = openai_chat.ChatRequest(model="m", messages=HELLO.messages, **fields)

    assert (await preparer.prepare_conversation(request, "r")).prompt == expected


async def test_named_template_for_tools_is_used_with_tools(model):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "<tool_call>"},
    ]
    write(model, "tokenizer_config.json", chat_template=named)
    tool = {"type": "function", "function": {"name": "f"}}
    both = {"model": "m", "messages": HELLO.messages, "tools": [tool]}

    assert await prompt_of(model) == "plain"
    assert await prompt_of(model, openai_chat.ChatRequest(**both)) == "<tool_call>"
    assert await prompt_of(model, openai_chat.ChatRequest(**both, tool_choice="none")) == "plain"


async def test_template_for_tools_in_a_file_of_its_own_is_used_with_tools(model):
    (model / "chat_template.jinja").write_text("plain")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>")
    tool = {"type": "function", "function": {"name": "f"}}
    with_tools = openai_chat.ChatRequest(model="m", messages=HELLO.messages, tools=[tool])

    assert await prompt_of(model) == "plain"
    assert await prompt_of(model, with_tools) == "<tool_call>"


@pytest.mark.parametrize("wrong", [[{"name": "x", "template": "y"}], 5, [1]])
def test_templates_without_a_default_are_refused(model, wrong):
    write(model, "tokenizer_config.json", chat_template=wrong)

    with pytest.raises(errors.ConfigError, match="chat_template: expected"):
        load(model)


async def test_special_tokens_are_texts_or_objects(model):
    write(
        model,
        "tokenizer_config.json",
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="<|im_end|>",
        pad_token=None,
    )

    assert await prompt_of(model) == "<s><|im_end|>False"


async def test_special_tokens_of_older_models_are_in_a_file_of_their_own(model):
    template = "{{ bos_token }}{{ eos_token }}"
    write(model, "tokenizer_config.json", chat_template=template, eos_token="<|im_end|>")
    write(model, "special_tokens_map.json", bos_token={"content": "<s>"}, eos_token="</s>")

    assert await prompt_of(model) == "<s><|im_end|>"


async def test_end_tokens_and_defaults_come_from_all_files(model, byte_level):
    write(model, "tokenizer_config.json", chat_template="Hi", eos_token="<|im_end|>")
    write(model, "config.json", eos_token_id=3, vocab_size=1000)
    write(model, "generation_config.json", eos_token_id=[4], top_k=20, max_new_tokens=9)
    request = (await load(model).prepare_conversation(HELLO, "r")).request

    assert request.eos_token_ids == (4, 3, byte_level.id_of("<|im_end|>"))
    assert request.sampling_options == generate.SamplingOptions(top_k=20)
    assert request.stop_conditions == generate.StopConditions(max_tokens=9)


MARKED = "{{ messages }} <tool_call> </think>"


@pytest.mark.parametrize(
    ("told", "calls", "thinks"),
    [
        ({}, "hermes", "basic"),
        ({"tool_call_parser": "phi4", "reasoning_parser": "deepseek_r1"}, "phi4", "deepseek_r1"),
        ({"tool_call_parser": "none", "reasoning_parser": "none"}, None, None),
    ],
)
def test_answer_format_comes_from_the_card_or_the_template(model, told, calls, thinks):
    write(model, "tokenizer_config.json", chat_template=MARKED)
    found = load(model, **told)._answer_format

    assert found.tools is formats.TOOL_CALL_FORMATS.get(calls)
    assert found.reasoning is formats.REASONING_FORMATS.get(thinks)


def test_unknown_tool_call_parser_is_refused(model):
    with pytest.raises(
        errors.ConfigError, match=r"--dyn-tool-call-parser: expected one of .*hermes"
    ):
        load(model, tool_call_parser="telepathy")


def card(path, names=()):
    files = {
        name: model_card.ModelFile(
            path=str(path / name),
            checksum="sha256:" + hashlib.sha256((path / name).read_bytes()).hexdigest(),
            size=(path / name).stat().st_size,
        )
        for name in names
    }
    return model_card.ModelCard(
        display_name="tiny",
        source_path=str(path),
        context_length=64,
        kv_cache_block_size=16,
        files=files,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def test_card_without_files_means_the_files_of_the_directory(folder):
    files = loading.ModelFiles(card(folder))

    assert files.read_json("config.json") == {"vocab_size": 5}
    assert files.read("tokenizer.json") is None
    assert files.read_json("tokenizer.json") == {}
    assert files.read_text("tokenizer.json") is None


def test_file_that_the_card_does_not_name_is_not_read(folder):
    files = loading.ModelFiles(card(folder, ["config.json"]))

    assert files.read("config.json") == b'{"vocab_size": 5}'
    assert files.read("other.json") is None


def test_file_with_another_checksum_is_a_config_error(folder):
    files = loading.ModelFiles(card(folder, ["config.json"]))
    (folder / "config.json").write_text('{"vocab_size": 6}')

    with pytest.raises(errors.ConfigError, match=r"config\.json is not the file that its worker"):
        files.read("config.json")


def test_missing_named_file_is_a_config_error(folder):
    files = loading.ModelFiles(card(folder, ["config.json"]))
    (folder / "config.json").unlink()

    with pytest.raises(errors.ConfigError, match=r"cannot read .*config\.json"):
        files.read("config.json")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_error_names_a_file_that_is_no_json_object(folder, content):
    (folder / "config.json").write_bytes(content)

    with pytest.raises(errors.ConfigError, match=r"config\.json: expected a JSON object"):
        loading.ModelFiles(card(folder)).read_json("config.json")


def test_error_names_a_file_that_is_no_text(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(errors.ConfigError, match=r"chat_template\.jinja: expected UTF-8"):
        loading.ModelFiles(card(folder)).read_text("chat_template.jinja")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "{tmp}/pipe"])
def test_file_that_is_no_regular_one_is_not_read(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    file = model_card.ModelFile(path=path.format(tmp=tmp_path), checksum="sha256:0", size=0)
    card = model_card.ModelCard(
        display_name="tiny",
        source_path=str(tmp_path),
        context_length=64,
        kv_cache_block_size=16,
        files={"tokenizer.json": file},
    )
    with pytest.raises(errors.ConfigError, match="expected a regular file"):
        loading.load_preprocessor(card, clock.VirtualClock())
