"""A GGUF file, served as a user would: `dynamo serve FILE.gguf`, and a conversation over the ordinary API."""

import concurrent.futures
import json
import re

import openai
import pytest

pytest.importorskip("xllamacpp", reason="needs xllamacpp and gguf (the extra llamacpp)")

import gguf_models
import ports
from waiting import PATIENT_S, eventually


@pytest.fixture
def client(deployment, tmp_path):
    deployment.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    # Letters and words of ASCII, so that an answer of random tokens is text.
    tokens = [*gguf_models.byte_letters()[33:127], "Ġ", "Ċ", "ab", *(f"Ġw{n}" for n in range(99))]
    path = gguf_models.write_model(tmp_path / "tiny-Q4_0.gguf", tokens=tokens)
    port = ports.reserve()
    flags = ("--http-port", str(port), "--worker-flags", "--threads 1 --max-num-seqs 2")
    process = deployment.run("dynamo.cli", "serve", *flags, str(path))
    eventually(
        lambda: "curl " in process.log.read_text() or not process.is_running,
        what=f"ready; see {process.log}",
    )
    assert re.search(r"engine +llamacpp", process.log.read_text()), process.log.read_text()
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=PATIENT_S, max_retries=0
    ) as client:
        yield client


def test_gguf_file_answers_chats_by_the_template_in_it(client):
    assert [model.id for model in client.models.list()] == ["tiny-Q4_0"]

    question = [{"role": "user", "content": "abc def"}]
    options = {"model": "tiny-Q4_0", "messages": question, "temperature": 0}
    whole = client.chat.completions.create(**options, max_tokens=8)
    streamed = client.chat.completions.create(**options, max_tokens=8, stream=True)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False  # a random model would write them for ever
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    guided = client.chat.completions.create(**options, response_format=form)

    # <|im_start|>user\\nabc def<|im_end|>\\n<|im_start|>assistant\\n, a token for each mark, letter, and "ab"
    assert whole.usage.prompt_tokens == 25
    assert whole.usage.completion_tokens == 8
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content
    assert json.loads(guided.choices[0].message.content)["a"] in ("x", "y")


def test_request_that_runs_out_of_context_ends_alone(client):
    def ask(text, max_tokens=None):
        answer = client.chat.completions.create(
            model="tiny-Q4_0",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
        )
        return answer.usage, answer.choices[0].finish_reason

    with concurrent.futures.ThreadPoolExecutor() as pool:
        (full, full_end), (short, short_end) = pool.map(ask, ["a" * 400, "bc" * 40], [None, 150])
    with pytest.raises(openai.BadRequestError, match=r"512 tokens"):
        ask("a" * 600)

    assert (full.total_tokens, full_end) == (512, "length")
    assert full.prompt_tokens > 400
    assert (short.completion_tokens, short_end) == (150, "length")
