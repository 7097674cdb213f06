"""The requests of Ollama's API, as conversations.

`/api/chat` has a conversation, `/api/generate` a prompt, which becomes the message of a user. Streaming is the default.
Options of how Ollama runs a model (`num_ctx`, `keep_alive` …) are hints: a worker here has its model loaded.
"""

import itertools
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import chat, embeddings
from dynamo.preprocess import conversation, images, infill, inputs, options, preprocessor
from dynamo.runtime.http import json_body

_TAG = ":latest"  # that Ollama's clients may add to a name
_ANY_IMAGE = "image/unknown"  # Ollama's clients do not tell the type, which the file itself does
_Messages = conversation.Messages
Think = bool | Literal["low", "medium", "high", "max"]
Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)] | None
EmptyText = Literal[""] | None
# As Go writes durations; possessive, because a client may send zeros without end.
_NO_TIME = re.compile(r"[+-]?(0|((0++(\.0*+)?|\.0++)(ns|us|µs|μs|ms|s|m|h))+)")


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling and length."""

    temperature: inputs.Temperature | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: inputs.Probability | None = None
    min_p: inputs.Probability | None = None
    seed: inputs.Int64 | None = None  # -1: none, which is Ollama's default
    stop: inputs.Stop | inputs.StopList | None = None
    # below 1: no limit
    num_predict: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] | None = None
    repeat_penalty: inputs.RepetitionPenalty | None = None
    presence_penalty: inputs.Penalty | None = None
    frequency_penalty: inputs.Penalty | None = None
    # without effect
    num_ctx: inputs.Hint = None
    num_keep: inputs.Hint = None
    num_batch: inputs.Hint = None
    num_gpu: inputs.Hint = None
    main_gpu: inputs.Hint = None
    num_thread: inputs.Hint = None
    use_mmap: inputs.Hint = None
    repeat_last_n: inputs.Hint = None


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request about a model (`/api/show`)."""

    model: str = ""
    name: str = ""  # the former name of `model`
    verbose: inputs.Hint = None

    def check(self) -> None:
        """Raise InvalidRequest without a model."""
        if not self.model and not self.name:
            raise errors.InvalidRequest.of_param("model", "required, but missing")

    @property
    def served_name(self) -> str:
        """The model's name as it is served here."""
        return (self.model or self.name).removesuffix(_TAG)


class OllamaInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both requests for text."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    # without effect
    keep_alive: inputs.Hint = None
    # refused, unless they ask for nothing
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    def to_conversation(
        self, messages: list[dict[str, Any]], **fields: Any
    ) -> "OllamaConversation":
        """Return the conversation with these messages."""
        chosen = self.options or OllamaOptions()
        response_format = None
        if isinstance(self.format, dict):
            schema = inputs.JsonSchema(name="format", schema=self.format)
            response_format = inputs.ResponseFormat(type="json_schema", json_schema=schema)
        elif self.format:
            response_format = inputs.ResponseFormat(type="json_object")
        thinking: dict[str, Any] = {}
        if self.think is not None:
            thinking = dict.fromkeys(options.SWITCHES, self.think is not False)
        return OllamaConversation(
            model=self.model.removesuffix(_TAG),
            messages=messages,
            stream=self.stream is not False,
            response_format=response_format,
            temperature=chosen.temperature,
            top_k=chosen.top_k,
            top_p=chosen.top_p,
            min_p=chosen.min_p,
            seed=None if chosen.seed == -1 else chosen.seed,
            stop=chosen.stop,
            max_tokens=None if (chosen.num_predict or 0) < 1 else chosen.num_predict,
            repetition_penalty=chosen.repeat_penalty,
            presence_penalty=chosen.presence_penalty,
            frequency_penalty=chosen.frequency_penalty,
            chat_template_kwargs=thinking,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            hides_thinking=self.think is False,
            keeps_alive=not _is_no_time(self.keep_alive),
            **fields,
        )


class OllamaChatRequest(OllamaInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation; without messages it only asks for the model to be loaded."""

    messages: _Messages | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=inputs.MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt; without one it only asks for the model to be loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    # refused, unless they ask for nothing
    template: EmptyText = None
    context: Nothing = None


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed."""

    model: str
    input: str | list[str]
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    truncate: bool | None = None  # None: yes
    # without effect
    options: inputs.Hint = None
    keep_alive: inputs.Hint = None


class OllamaEmbedPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One text to embed, in the form of older clients."""

    model: str
    prompt: str
    # without effect
    options: inputs.Hint = None
    keep_alive: inputs.Hint = None


class OllamaConversation(inputs.Conversation, frozen=True, kw_only=True):
    """The conversation of a request."""

    is_chat: bool
    hides_thinking: bool = False
    keeps_alive: bool = True  # False: without a prompt, it asks for the model to be unloaded
    suffix: str | None = None  # the text behind the answer

    @property
    def effort_param(self) -> str:
        return "think"

    @property
    def format_param(self) -> str:
        return "format"

    @property
    def fits_context(self) -> bool:
        return True

    @property
    def whole_tools(self) -> None:
        """All calls come in one piece: an answer has their arguments as objects, which a part of one is not."""
        return None


_decode_chat = json_body.RequestDecoder(OllamaChatRequest).decode
_decode_generate = json_body.RequestDecoder(OllamaGenerateRequest).decode
_decode_embed = json_body.RequestDecoder(OllamaEmbedRequest).decode
_decode_embed_prompt = json_body.RequestDecoder(OllamaEmbedPrompt).decode
decode_model = json_body.RequestDecoder(OllamaModelRequest).decode


def decode_chat(body: bytes) -> OllamaConversation:
    """Return the conversation of a chat; without messages it only loads. Raises InvalidRequest."""
    request = _decode_chat(body)
    messages = [
        _convert_message(message, f"messages[{number}]")
        for number, message in enumerate(request.messages or ())
    ]
    _number_calls(messages)
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and not last.get("tool_calls")
    text = last["content"] if is_begun else ""
    is_continued = isinstance(text, str) and text != ""
    turn = request.to_conversation(
        messages, tools=request.tools, is_chat=True, continue_final_message=is_continued
    )
    return _checked(turn)


def decode_generate(body: bytes) -> OllamaConversation:
    """Return the conversation of a prompt, as `decode_chat` does. Raises InvalidRequest."""
    request = _decode_generate(body)
    messages: list[dict[str, Any]] = []
    if request.prompt:
        content = _with_images(request.prompt, request.images, "images")
        messages.append({"role": "user", "content": content})
    if request.suffix and request.images:
        raise errors.InvalidRequest.of_param("images", "not supported together with suffix")
    if request.system and messages and not request.raw:
        messages.insert(0, {"role": "system", "content": request.system})
    raw = inputs.NvExt(use_raw_prompt=True) if request.raw else None
    return _checked(
        request.to_conversation(messages, nvext=raw, is_chat=False, suffix=request.suffix)
    )


async def prepare(
    preparer: preprocessor.Preprocessor, turn: OllamaConversation, request_id: str
) -> Sequence[preprocessor.Prepared]:
    """Prepare the prompt, which with a suffix is the text before and behind the answer. Raises RequestError."""
    if turn.suffix:
        text = turn.messages[-1]["content"]
        (prompt,) = infill.join_prompts([text], turn.suffix, preparer.infill_format, turn.model)
        turn = msgspec.structs.replace(
            turn,
            messages=[{"role": "user", "content": prompt}],
            nvext=inputs.NvExt(use_raw_prompt=True),
        )
    return await chat.prepare(preparer, turn, request_id)


def decode_embed(body: bytes) -> embeddings.TextEmbeddingRequest:
    """Return the request for embeddings in OpenAI's form. Raises InvalidRequest."""
    request = _decode_embed(body)
    texts = [request.input] if isinstance(request.input, str) else request.input
    return _embed(request.model, texts, request.dimensions, cuts=request.truncate is not False)


def decode_embed_prompt(body: bytes) -> embeddings.TextEmbeddingRequest:
    """Return the request of an older client, with one text, in OpenAI's form. Raises InvalidRequest."""
    request = _decode_embed_prompt(body)
    return _embed(request.model, [request.prompt])


def _embed(
    model: str, texts: list[str], dimensions: int | None = None, *, cuts: bool = False
) -> embeddings.TextEmbeddingRequest:
    converted = embeddings.TextEmbeddingRequest(
        model=model.removesuffix(_TAG),
        input=[*texts],
        dimensions=dimensions,
        truncate_prompt_tokens=-1 if cuts else None,
    )
    converted.check()
    return converted


def _is_no_time(duration: object) -> bool:
    """Return whether a duration is zero: of seconds, or as text such as `0s`."""
    if isinstance(duration, str):
        return _NO_TIME.fullmatch(duration) is not None
    return isinstance(duration, int | float) and duration is not False and duration == 0


def _checked(turn: OllamaConversation) -> OllamaConversation:
    if turn.messages:
        turn.check()
    else:
        conversation.check_tools(turn.tools or [])
    return turn


def _convert_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message in OpenAI's form. Raises InvalidRequest."""
    named = {"thinking": "reasoning_content", "tool_name": "name"}
    converted = {
        named.get(key, key): value
        for key, value in message.items()
        if value is not None and key != "images"
    }
    converted.setdefault("content", "")
    files = message.get("images")
    if files and isinstance(converted["content"], str):
        converted["content"] = _with_images(converted["content"], files, f"{place}.images")
    return converted


def _number_calls(messages: list[dict[str, Any]]) -> None:
    """Give calls and their results ids where they have none, as with Ollama: templates of Mistral's models refuse that.

    A result is that of the first call of its tool without one; if it names no tool, of the first call without one.
    """
    numbers = itertools.count()
    # the names of tools by the ids of calls without a result, and these ids by name
    open_calls: OrderedDict[str, str] = OrderedDict()
    ids_by_name: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def close(call_id: str) -> None:
        called = open_calls.pop(call_id, None)
        if called is not None:
            del ids_by_name[called][call_id]

    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                call_id = call["id"] = str(call.get("id") or f"call{next(numbers):05}")
                close(call_id)
                open_calls[call_id] = called = _as_text(call["function"].get("name"))
                ids_by_name[called][call_id] = None
        if message.get("role") == "tool":
            name, result_of = message.get("name"), message.get("tool_call_id")
            if not result_of:
                open_ids: Iterable[str] = ids_by_name.get(_as_text(name), ())
                open_ids = open_calls if name is None else open_ids
                result_of = next(iter(open_ids), None)
                message |= {} if result_of is None else {"tool_call_id": result_of}
            close(str(result_of))


def _as_text(name: Any) -> str:
    return name if isinstance(name, str) else ""


def _with_images(text: str, files: Any, place: str) -> str | list[dict[str, Any]]:
    """Return the content with these files before the text, as Ollama places them. Raises InvalidRequest."""
    if not files:
        return text
    if not isinstance(files, list):
        got = json_body.describe(files)
        raise errors.InvalidRequest.of_param(place, f"expected a list, got {got}")
    parts = [_convert_image(file, f"{place}[{number}]") for number, file in enumerate(files)]
    return [*parts, {"type": "text", "text": text}]


def _convert_image(file: Any, place: str) -> dict[str, Any]:
    if not isinstance(file, str):
        raise errors.InvalidRequest.of_param(
            place, f"expected a file in base64, got {json_body.describe(file)}"
        )
    return images.make_part(images.data_url(_ANY_IMAGE, file), place)
