"""Images reach the engine as files, in order; the prompt has the marks of the model's template."""

import base64

import chat_templates
import pytest

from dynamo.base import errors
from dynamo.frontend.apis import chat as openai_chat
from dynamo.preprocess import images, options, preprocessor
from dynamo.preprocess.parsers import formats
from dynamo.protocols import blocks

SEEING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '大丈夫' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
# As those of Llava and SmolVLM: every content is a list.
PARTS_ONLY = (
    "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}大丈夫{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def make_model(byte_level):
    """Return a model for which 大丈夫 is the token of an image."""

    def make(max_images=2, source=SEEING):
        tokens = frozenset([byte_level.id_of("大丈夫")])
        return preprocessor.Preprocessor(
            tokenizer=byte_level,
            chat_template=chat_templates.compiled(source),
            context_length=400,
            vocab_size=byte_level.num_ids,
            eos_token_ids=(2,),
            defaults=options.GenerationDefaults(),
            answer_format=formats.AnswerFormat(),
        ).with_images(images.ImageInput(max_images, tokens))

    return make


def image(file=b"an image", kind="png"):
    url = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def text(words):
    return {"type": "text", "text": words}


def chat(*parts):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": list(parts)},
    ]
    request = openai_chat.ChatRequest(model="m", messages=messages)
    request.check()
    return request


async def prepare(model, *parts):
    return await model.prepare_conversation(chat(*parts), "r")


async def refused(model, *parts):
    with pytest.raises(errors.InvalidRequest) as caught:
        await prepare(model, *parts)
    return caught.value.param, str(caught.value)


async def test_files_come_in_order_and_the_template_marks_their_places(make_model):
    prepared = await prepare(
        make_model(), image(b"one"), text("or "), image(b"two", "jpeg"), text("?")
    )

    assert prepared.request.images == (b"one", b"two")
    assert prepared.prompt.endswith("user\n大丈夫or 大丈夫?<|im_end|>\n")


async def test_result_of_a_tool_may_be_an_image(make_model):
    request = openai_chat.ChatRequest(
        model="m",
        messages=[
            {"role": "user", "content": "Look."},
            {"role": "tool", "tool_call_id": "c", "content": [text("seen: "), image(b"one")]},
        ],
    )
    request.check()
    prepared = await make_model().prepare_conversation(request, "r")

    assert prepared.request.images == (b"one",)
    assert prepared.prompt.endswith("tool\nseen: 大丈夫<|im_end|>\n")


async def test_only_tokens_before_the_first_image_are_hashed(make_model, byte_level):
    request = (await prepare(make_model(), text("Look: "), image())).request
    hashed = blocks.unpack(request.hashed_ids)

    assert byte_level.decode(hashed, skip_special_tokens=False).endswith("user\nLook: ")
    assert len(hashed) < request.prompt_len


async def test_nothing_is_hashed_where_the_token_of_images_is_unknown(make_model):
    model = make_model().with_images(images.ImageInput(1))

    assert (await prepare(model, text("Look: "), image())).request.hashed_ids == b""


async def test_all_tokens_of_a_text_are_hashed(make_model):
    request = (await prepare(make_model(), text("Hi"))).request

    assert request.images == ()
    assert request.hashed_ids == request.token_ids


async def test_template_that_knows_parts_only_gets_parts(make_model):
    prepared = await prepare(make_model(source=PARTS_ONLY), image(), text("What is it?"))

    assert prepared.prompt == "Be brief.大丈夫What is it?"


async def test_template_that_knows_parts_only_gets_parts_of_a_model_of_text(make_model):
    prepared = await prepare(make_model(max_images=0, source=PARTS_ONLY), text("What is it?"))

    assert prepared.prompt == "Be brief.What is it?"


async def test_template_that_reads_the_types_of_tools_gets_texts(make_model):
    source = (
        "{% for t in tools or [] %}{{ t.type }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    prepared = await prepare(make_model(source=source), text("What is it?"))

    assert prepared.prompt == "Be brief.What is it?"


async def test_answer_is_continued_by_a_template_that_knows_parts_only(make_model):
    request = openai_chat.ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is"}],
        continue_final_message=True,
    )
    request.check()
    prepared = await make_model(source=PARTS_ONLY).prepare_conversation(request, "r")

    assert prepared.prompt == "HiIt is"


async def test_model_of_text_refuses_an_image_by_its_place(make_model):
    param, sentence = await refused(make_model(max_images=0), text("x"), image())

    assert param == "messages[1].content[1]"
    assert "reads text only" in sentence


async def test_tokenize_refuses_an_image_for_a_model_of_text(make_model):
    with pytest.raises(errors.InvalidRequest, match="reads text only"):
        await make_model(max_images=0).tokenize_conversation(chat(image()))


async def test_one_image_too_many_is_named(make_model):
    param, sentence = await refused(make_model(max_images=1), image(), image())

    assert param == "messages[1].content[1]"
    assert "at most 1 images" in sentence


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("https://example.org/cat.png", "nothing is fetched"),
        ("data:text/html;base64,AAAA", "expected the image itself"),
        ("data:image/png;base64,a", "expected base64"),
        ("data:image/png;base64,ä", "expected base64"),
        ("", "expected the image itself"),
    ],
)
async def test_what_is_no_image_in_the_request_is_refused(make_model, url, sentence):
    param, got = await refused(make_model(), {"type": "image_url", "image_url": {"url": url}})

    assert param == "messages[1].content[0].image_url.url"
    assert sentence in got


async def test_images_that_no_frame_holds_are_refused(make_model, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    param, sentence = await refused(make_model(), image(bytes(60)), image(bytes(60)))

    assert param == "messages"
    assert "in all" in sentence


def test_tokens_of_images_come_from_the_configuration():
    config = {"image_token_id": 7, "vision_start_token_id": None, "boi_token_index": 9}

    assert images.ImageInput.of_model(config, 1).tokens == {7, 9}
