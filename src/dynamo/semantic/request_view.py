"""A request's JSON as the semantic router sees it: its texts, and what a model must be able to do to answer it.

Chat, completions, responses and Anthropic's messages are told apart by their fields. Texts in lists of parts count;
parts of other kinds (images) are noted and passed on.
"""  # decider

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.runtime.http import exchange, json_body

RequestApi = Literal[
    "chat", "responses", "messages", "completions", "ollama", "ollama_generate", "other"
]
_API_BY_PATH: dict[str, RequestApi] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/api/chat": "ollama",
    "/api/generate": "ollama_generate",
    "/v1/completions": "completions",
}
# The field of the messages or the prompt; of other APIs it is `messages`, if they have them.
_FIELD_BY_API = {"responses": "input", "completions": "prompt", "ollama_generate": "prompt"}
_RESULT_ITEMS = ("function_call_output", "custom_tool_call_output")
_IMAGE_KINDS = ("image_url", "input_image", "image")
# What a model sees of a message or a part, beside its calls of tools; `input` and `arguments` may be JSON objects.
_TEXT_FIELDS = (
    "text", "content", "output", "refusal", "reasoning_content", "reasoning", "thinking", "arguments", "input",
    "title", "context", "summary", "tool_plan",
)  # fmt: skip
_NAME_FIELDS = ("name", "tool_name", "role")
_ID_FIELDS = ("id", "tool_call_id", "tool_use_id", "call_id")
_MESSAGE_FIELDS = ("messages", "input", "prompt", "text_input")
# Beside the messages; a template may write all of the last three into the prompt.
_ANY_VALUES = ("documents", "chat_template_kwargs", "chat_template_args")
_SYSTEM_FIELDS = ("system", "instructions")  # a system prompt, in APIs that keep it apart
_OTHER_FIELDS = (*_SYSTEM_FIELDS, "suffix", *_ANY_VALUES)
_OUTPUT_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_CHARACTERS_PER_TOKEN = 4  # of English text; a rough estimate of a prompt's length
_SHORT_PART = 200  # characters; a longer part of a message is judged well enough alone
MAX_MESSAGES = 100_000  # which is what the frontend takes
# So many texts are read one by one: each takes some tenths of a millisecond, however short it is.
MANY_TEXTS = 1000
_GROUP_CHARS = 4096  # of the others, which are read together
_USUAL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,48}")  # of a tool, argument, participant or role
_USUAL_ID = re.compile(r"[A-Za-z0-9_.:|+/=-]{1,256}")  # of an item or a call
# The first line of Claude Code's system prompt, another one in each request.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_decoder = msgspec.json.Decoder()


def api_of(path: str) -> RequestApi:
    """Return the API that a path of HTTP belongs to."""
    return _API_BY_PATH.get(path, "other")


@contextlib.contextmanager
def refuse_deep_values() -> Iterator[None]:
    """Raise InvalidRequest for a body that could just be decoded, and is nested too deeply for what reads it."""
    try:
        yield
    except RecursionError as error:
        raise errors.InvalidRequest(
            "expected lists and objects of a few levels, got far too many"
        ) from error


class RequestView:
    """The parts of one request that decide its route. Raises InvalidRequest for a body that is no JSON object."""

    def __init__(self, body: bytes, api: RequestApi = "chat") -> None:
        """`api` is what the request asks: a server passes over the fields of other APIs that a body has as well."""
        if len(body) > exchange.SMALL_BODY_BYTES:
            json_body.check_structure(body)
        try:
            fields = _decoder.decode(body.removeprefix(b"\xef\xbb\xbf"))  # as servers do
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise errors.InvalidRequest(f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise errors.InvalidRequest("expected a JSON object, got another value")
        self.body = body
        self.fields: dict[str, Any] = fields
        model = fields.get("model")
        self.model: str = model if isinstance(model, str) else ""
        if api in ("ollama", "ollama_generate"):
            self.model = self.model.removesuffix(":latest")  # which its clients may add
        self.has_tools = bool(fields.get("tools"))  # or those that the router adds
        self.is_stream: bool = fields.get("stream") is True
        names = (_FIELD_BY_API.get(api, "messages"), "messages", "prompt", "input")
        self.messages_field = next((n for n in names if fields.get(n) is not None), "messages")
        raw = fields.get(self.messages_field)
        if isinstance(raw, str):
            raw = [{"role": "user", "content": raw}]
        items = raw if isinstance(raw, list) else []
        if items and isinstance(items[0], int):  # one prompt as token ids
            items = [{"role": "user", "content": items}]
        if len(items) > MAX_MESSAGES:
            raise errors.InvalidRequest.of_param(
                self.messages_field, f"expected at most {MAX_MESSAGES}, got {len(items)}"
            )
        self.messages: list[dict[str, Any]] = [
            item if isinstance(item, dict) else {"role": "user", "content": item} for item in items
        ]

    @cached_property
    def last_user(self) -> int:
        """Return the number of the last user message, -1 if there is none."""
        users = [n for n, message in enumerate(self.messages) if message.get("role") == "user"]
        return users[-1] if users else -1

    @cached_property
    def user_text(self) -> str:
        """Return the text of the last user message."""
        return text_of(self.messages[self.last_user]) if self.last_user >= 0 else ""

    @cached_property
    def texts(self) -> list[str]:
        """Return every text that a model would see: all messages, tool results and arguments, system prompts.

        Not the definitions of tools: those of coding agents are full of orders ("NEVER …", "IMPORTANT: …"), in which
        the classifiers see attacks (risks of 0.7 to 0.97 for four of five).

        A body may have the fields of several APIs; which of them is answered is not known here, so all are read.
        Of many texts the first are joined: to read many costs no more than to read a long one.
        """
        return self._list_texts(self.messages, self._other_values)

    def texts_beside(self, roles: Collection[str]) -> list[str]:
        """Return the texts without those of messages with these roles; all, if the request brings a template."""
        if not roles or isinstance(self.fields.get("chat_template"), str):
            return self.texts
        left_out = _SYSTEM_FIELDS if "system" in roles else ()
        others = {name: text for name, text in self._other_values.items() if name not in left_out}
        messages = [each for each in self.messages if each.get("role") not in roles]
        return self._list_texts(messages, others)

    def _list_texts(
        self, messages: Sequence[dict[str, Any]], other_values: Mapping[str, Any]
    ) -> list[str]:
        texts = _list_single_texts(messages, other_values)
        texts += [_join_short(_parts_of(each)) for each in messages]
        texts += [_join_short(_parts(value)) for value in other_values.values()]
        if isinstance(template := self.fields.get("chat_template"), str):
            texts += [template, *_strings(messages)]  # it may write what no other does
        return _join_first([text for text in texts if text])

    @cached_property
    def _other_values(self) -> dict[str, Any]:
        """Return the values of the fields beside the messages of which a model may see the texts."""
        names = (*_MESSAGE_FIELDS, *_OTHER_FIELDS)
        return {name: self.fields.get(name) for name in names if name != self.messages_field}

    @property
    def has_token_ids(self) -> bool:
        """Return whether a prompt is given as token ids, which no classifier can read."""
        prompt, extensions = _parts(self.fields.get("prompt")), self.fields.get("nvext")
        if isinstance(extensions, dict) and extensions.get("token_data"):
            return True  # instead of all else
        return any(isinstance(item, int | list) for item in prompt)

    @property
    def has_images(self) -> bool:
        """Return whether a message or the result of a tool has an image, or Ollama's `images` are there."""
        if self.fields.get("images") or any(message.get("images") for message in self.messages):
            return True
        parts = [part for message in self.messages for part in _parts_of(message)]
        parts += [inner for part in parts for inner in _parts_of(part)]
        return any(part.get("type") in _IMAGE_KINDS for part in parts)

    @property
    def may_call(self) -> bool:
        """Return whether the model chooses if it calls one of the tools."""
        choice = self.fields.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        return self.has_tools and kind in (None, "auto")

    @property
    def wants_structure(self) -> bool:
        """Return whether the answer must follow a schema or grammar, in the words of any of the APIs."""
        holders = [self.fields.get(name) for name in ("text", "output_config")]
        kinds = [holder.get("format") for holder in holders if isinstance(holder, dict)]
        kinds.append(self.fields.get("response_format"))
        if any(isinstance(kind, dict) and kind.get("type") not in (None, "text") for kind in kinds):
            return True
        extensions = self.fields.get("nvext")
        guided = {**self.fields, **(extensions if isinstance(extensions, dict) else {})}
        return any(
            value
            for name, value in guided.items()
            if name.startswith("guided_") or name in ("structured_outputs", "format")
        )

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream is to end with the usage."""
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    @property
    def least_context(self) -> int:
        """Return an estimate of the tokens of prompt and answer, which the context must have room for."""
        texts = _list_single_texts(self.messages, self._other_values)
        prompt = sum(map(len, texts)) // _CHARACTERS_PER_TOKEN
        limits = (self.fields.get(name) for name in _OUTPUT_LIMITS)
        return prompt + next((limit for limit in limits if isinstance(limit, int)), 0)

    @property
    def is_tool_result(self) -> bool:
        """Return whether the request brings the result of a tool call that the model asked for."""
        last = self.messages[-1] if self.messages else {}
        kinds = {part.get("type") for part in _parts(last.get("content")) if isinstance(part, dict)}
        is_result = last.get("role") == "tool" or last.get("type") in _RESULT_ITEMS
        return is_result or "tool_result" in kinds

    def history_hash(self, num_messages: int) -> str:
        """Return a hash of the first messages, the same in every later turn of a conversation."""
        system = _BILLING_LINE.sub("", "\n".join(_texts(self.fields.get("system"))))
        history: list[Any] = [system, self.messages[:num_messages]]
        if b'"cache_control"' in self.body:
            history = _without_marks(history)
        data = msgspec.json.encode(history, order="deterministic")
        return hashlib.blake2b(data, digest_size=16).hexdigest()


def _without_marks(value: Any) -> Any:
    """Return a value of JSON without the marks of what a server is to cache, and a text alone in a list as a text.

    Clients of Anthropic's API set the mark in the newest messages of each turn, which they write as lists for it.
    """
    if isinstance(value, dict):
        return {k: _without_marks(inner) for k, inner in value.items() if k != "cache_control"}
    if not isinstance(value, list):
        return value
    items = [_without_marks(inner) for inner in value]
    is_text = len(items) == 1 and isinstance(items[0], dict) and items[0].keys() == {"type", "text"}
    return items[0]["text"] if is_text else items


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message; parts are joined by blank lines."""
    return "\n\n".join(text for text in _texts(message.get("content")) if text)


def _list_single_texts(
    messages: Sequence[dict[str, Any]], other_values: Mapping[str, Any]
) -> list[str]:
    """Return the texts, each as often as the request has it."""
    texts = [text for message in messages for text in _texts(message)]
    for name, value in other_values.items():
        texts += _strings(value) if name in _ANY_VALUES else _texts(value)
    return texts


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a message, a list of parts, or a part, tool calls included."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                if type(item) is not int:  # of token ids there may be millions
                    yield from _texts(item)
        case dict():
            for name in _TEXT_FIELDS:
                inner = value.get(name)
                is_call = name in ("arguments", "input") and isinstance(inner, dict)
                yield from _strings(inner) if is_call else _texts(inner)
            source = value.get("source")  # of a document; that of an image is no text
            if isinstance(source, dict) and source.get("type") in ("text", "content"):
                yield from _texts([source.get("data"), source.get("content")])
            calls = [call for call in _parts(value.get("tool_calls")) if isinstance(call, dict)]
            yield from _unusual_names(value.get(name) for name in _NAME_FIELDS)
            ids = [value.get(name) for name in _ID_FIELDS]
            yield from _unusual_names([*ids, *(call.get("id") for call in calls)], _USUAL_ID)
            functions = [call.get(kind) for call in calls for kind in ("function", "custom")]
            for function in (value.get("function_call"), *functions):
                if isinstance(function, dict):
                    names = ("name", "arguments", "input")
                    yield from _texts({name: function.get(name) for name in names})


def _unusual_names(names: Iterable[Any], usual: re.Pattern[str] = _USUAL_NAME) -> Iterator[str]:
    """Yield what stands in the place of a name, which a template may write into the prompt, and is none."""
    for name in names:
        if isinstance(name, str) and name and not usual.fullmatch(name):
            yield name


def _join_first(texts: list[str]) -> list[str]:
    """Return the last `MANY_TEXTS`, behind those before them, joined in groups."""
    groups: list[list[str]] = []
    num_chars = _GROUP_CHARS
    for text in texts[:-MANY_TEXTS]:
        if num_chars >= _GROUP_CHARS:
            groups.append([])
            num_chars = 0
        groups[-1].append(text)
        num_chars += len(text)
    return [*map("\n\n".join, groups), *texts[-MANY_TEXTS:]]


def _join_short(parts: Sequence[Any]) -> str:
    """Return the short texts among parts as a template joins them: one cut into many is found in no single part."""
    values = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [text for text in values if isinstance(text, str) and len(text) <= _SHORT_PART]
    return "".join(texts) if len(texts) > 1 else ""


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value of JSON, and those names of its members that are no usual ones."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text:
                yield text
            case list() as items:
                pending += reversed(items)
            case dict() as members:
                yield from _unusual_names(members)
                pending += reversed(members.values())


def _parts_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message, or of a tool's result."""
    parts = [*_parts(item.get("content")), *_parts(item.get("output"))]
    return [part for part in parts if isinstance(part, dict)]


def _parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
