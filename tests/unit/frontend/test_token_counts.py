"""Tokenize, detokenize: vLLM's shapes."""

import json
import shutil
import threading

import pytest

from dynamo.preprocess import preprocessor


async def tokenize(rig, **fields):
    return await rig.client.post("/tokenize", json=fields)


async def test_tokenize_returns_the_tokens_of_a_text(rig):
    answer = await tokenize(rig, model="m", prompt="hi")

    assert answer.json() == {
        "count": 2,
        "max_model_len": 200,
        "tokens": [104, 105],
        "token_strs": None,
    }
    assert answer.headers["x-request-id"]


async def test_tokenize_counts_a_conversation_as_its_usage_does(rig):
    messages = [{"role": "user", "content": "hi"}]
    told = (await tokenize(rig, model="m", messages=messages, return_token_strs=True)).json()
    usage = (await rig.chat("hi")).json()["usage"]

    assert told["count"] == len(told["tokens"]) == usage["prompt_tokens"]
    assert told["token_strs"] == ["u", "s", "e", "r", ":", "Ġ", "h", "i", "Ċ"]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"continue_final_message": True}, "user: hi\nassistant: Well,"),
        ({"continue_final_message": False}, "user: hi\nassistant: Well,\n"),
        ({"chat_template": "{{ messages[0].content }}"}, "hi"),
        ({"mm_processor_kwargs": {"fps": 1}}, "user: hi\nassistant: Well,\n"),
    ],
)
async def test_tokenize_takes_the_fields_of_a_chat_that_make_its_prompt(rig, fields, prompt):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    answer = await tokenize(rig, model="m", messages=messages, **fields)

    assert bytes(answer.json()["tokens"]).decode() == prompt


async def test_detokenize_includes_special_tokens(rig):
    answer = await rig.client.post("/detokenize", json={"model": "m", "tokens": [104, 105, 256]})

    assert answer.json() == {"prompt": "hi<end>"}


async def test_tokenizer_info_has_the_special_tokens_and_the_chat_template(bare, tmp_path):
    bare.model_dir = shutil.copytree(bare.model_dir, tmp_path / "model")
    config = {"chat_template": "Hi", "eos_token": {"content": "<end>"}}
    (bare.model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    await bare.start()
    await bare.worker()
    info = (await bare.client.get("/tokenizer_info")).json()

    assert info == {
        "bos_token": None,
        "eos_token": "<end>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": "Hi",
    }


async def test_tokenizer_info_needs_the_name_of_one_of_two_models(rig):
    await rig.worker("other")
    unnamed = await rig.client.get("/tokenizer_info")
    named = await rig.client.get("/tokenizer_info?model=other")
    unknown = await rig.client.get("/tokenizer_info?model=q")

    assert (unnamed.status_code, named.status_code, unknown.status_code) == (400, 200, 404)


async def test_model_is_optional_if_only_one_is_served(rig):
    alone = await tokenize(rig, prompt="hi")
    await rig.worker("other")
    one_of_two = await tokenize(rig, prompt="hi")

    assert alone.json()["count"] == 2
    assert one_of_two.status_code == 400
    assert "'m', 'other'" in one_of_two.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "m"}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"model": "m", "messages": []}, 400, "messages"),
        ("/tokenize", {"model": "q", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "m", "prompt": "x", "chat_template": "y"}, 400, "chat_template"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            400,
            "continue_final_message",
        ),
        ("/detokenize", {"model": "m", "tokens": [999]}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": ["x"]}, 400, "tokens[0]"),
        ("/detokenize", {"model": "m"}, 400, "tokens"),
    ],
)
async def test_error_for_an_invalid_count_request_names_the_field(rig, path, body, status, param):
    answer = await rig.client.post(path, json=body)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


async def test_names_of_tokens_are_listed_beside_the_event_loop(rig, monkeypatch):
    list_names, threads = preprocessor.Preprocessor.list_vocabulary, []

    def list_in_thread(preparer, token_ids):
        threads.append(threading.current_thread())
        return list_names(preparer, token_ids)

    monkeypatch.setattr(preprocessor.Preprocessor, "list_vocabulary", list_in_thread)
    answer = await tokenize(rig, model="m", prompt="hi", return_token_strs=True)

    assert answer.json()["token_strs"] == ["h", "i"]
    assert [thread is threading.main_thread() for thread in threads] == [False]
