"""Images in chats with a model that sees, over real vLLM: a worker and a frontend as users start them."""

import base64
import concurrent.futures
import importlib.util
import io
import warnings

import httpx
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import openai
from deployment import Deployment
from PIL import Image

from dynamo.base import errors
from dynamo.engine.adapters import settings
from waiting import PATIENT_S, eventually

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm_models
    from dynamo.engine.adapters.vllm import versions

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
START_S = 600.0  # on a busy machine; usually half a minute
MARKS = 7  # tokens of an image: four, and three around them
FLAGS = (
    "--model-name sees --enforce-eager --dtype float32 --block-size 32 --num-gpu-blocks-override 60"
    " --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 512"
    ' --limit-mm-per-prompt {"image":2}'
)


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    if (settings.VLLM.installed_version or "").startswith("0.28."):
        pytest.skip("vLLM 0.28 computes this model's pictures on no CPU")
    directory = tmp_path_factory.mktemp("images")
    deployment = Deployment(directory)
    model = vllm_models.make_seeing(directory / "model")
    worker = deployment.vllm("--model", str(model), *FLAGS.split())
    made = deployment.frontend("--router-mode", "kv")

    def is_served():
        worker.check()
        return made.models() == ["sees"]

    try:
        eventually(is_served, within_s=START_S, what="the model", every_s=0.5)
        yield made
    finally:
        deployment.end()


def picture_file(colour):
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return file.getvalue()


def picture(colour):
    """Return the part of a message that holds a picture of one colour."""
    encoded = base64.b64encode(picture_file(colour)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def connect(frontend):
    return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="-", timeout=PATIENT_S)


def ask(frontend, *parts):
    """Return what the model says to these pictures and words, greedily."""
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    with connect(frontend) as client:
        return client.chat.completions.create(
            model="sees",
            messages=[{"role": "user", "content": content}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
        )


def chances(answer):
    return [round(token.logprob, 2) for token in answer.choices[0].logprobs.content]


def test_answer_depends_on_the_picture(frontend):
    red = ask(frontend, picture("red"), "What is it?")
    blue = ask(frontend, picture("blue"), "What is it?")
    again = ask(frontend, picture("red"), "What is it?")

    assert chances(red) == chances(again)
    assert chances(red) != chances(blue)


def test_usage_counts_the_tokens_of_pictures(frontend):
    text = ask(frontend, "What is it?").usage.prompt_tokens
    one = ask(frontend, picture("red"), "What is it?").usage.prompt_tokens
    two = ask(frontend, picture("red"), picture("blue"), "What is it?").usage.prompt_tokens

    assert (one - text, two - one) == (MARKS, MARKS)


def test_prompt_with_the_same_picture_is_cached_and_with_another_is_not(frontend):
    words = "What is it? " * 20
    first = ask(frontend, picture("green"), words)
    again = ask(frontend, picture("green"), words)
    other = ask(frontend, picture("black"), words)

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_choices_of_one_request_see_the_same_picture(frontend):
    content = [picture("yellow"), {"type": "text", "text": "What is it?"}]
    with connect(frontend) as client:
        answer = client.chat.completions.create(
            model="sees",
            messages=[{"role": "user", "content": content}],
            max_tokens=12,
            temperature=0,
            n=3,
        )
    alone = ask(frontend, picture("yellow"), "What is it?")

    assert {choice.message.content for choice in answer.choices} == {
        alone.choices[0].message.content
    }
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


def test_other_apis_show_the_same_picture(frontend):
    part = picture("purple")
    encoded = part["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    turn = {
        "role": "user",
        "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}],
    }
    body = {"model": "sees", "max_tokens": 12, "temperature": 0, "messages": [turn]}
    told = httpx.post(f"{frontend.url}/v1/messages", json=body, timeout=PATIENT_S).json()
    chat = ask(frontend, part, "What is it?")

    assert told["content"][0]["text"] == chat.choices[0].message.content


def test_many_pictures_at_once_are_each_answered(frontend):
    shades = [(shade, 0, 0) for shade in range(0, 240, 20)]
    alone = [chances(ask(frontend, picture(shade), "?")) for shade in shades[:2]]
    with concurrent.futures.ThreadPoolExecutor(len(shades)) as pool:
        answers = list(pool.map(lambda shade: ask(frontend, picture(shade), "?"), shades))

    assert [chances(answer) for answer in answers[:2]] == alone
    assert all(answer.usage.completion_tokens for answer in answers)


def test_one_picture_too_many_is_refused(frontend):
    with pytest.raises(openai.BadRequestError, match="at most 2 images"):
        ask(frontend, picture("red"), picture("red"), picture("red"))


def test_file_that_is_no_picture_is_refused(frontend):
    encoded = base64.b64encode(b"no picture").decode()
    url = f"data:image/png;base64,{encoded}"
    with pytest.raises(openai.BadRequestError, match="image 0"):
        ask(frontend, {"type": "image_url", "image_url": {"url": url}})

    assert ask(frontend, "Hello").usage.completion_tokens > 0


def cut_png():
    """Return a picture of which the data's chunk says that it is shorter."""
    file = io.BytesIO()
    Image.new("RGB", (40, 40)).save(file, "PNG")
    content = bytearray(file.getvalue())
    content[content.index(b"IDAT") - 1] -= 5
    return bytes(content)


def huge_bmp():
    """Return a small file of a picture that says to be 60,000 pixels wide and as high."""
    file = io.BytesIO()
    Image.new("RGB", (40, 40)).save(file, "BMP")
    return file.getvalue()[:18] + 2 * (60_000).to_bytes(4, "little") + file.getvalue()[26:]


@pytest.mark.parametrize("make_file", [cut_png, huge_bmp])
def test_damaged_file_is_no_fault_of_the_engine(make_file):
    with pytest.raises(errors.InvalidRequest, match="image 1 of the messages"):
        versions._image_prompt([1, 2], [picture_file("red"), make_file()], None)


def test_model_says_that_it_takes_images(frontend):
    (model,) = httpx.get(f"{frontend.url}/v1/models", timeout=PATIENT_S).json()["data"]

    assert "images" in model["capabilities"]
