"""The messages and tools of a conversation: what is allowed in them, and how chat templates expect them.

Messages are dictionaries, because chat templates walk through them; unknown keys are passed on to the template.
Templates are written for Hugging Face's form, which differs from OpenAI's in little: content is one text, the arguments
of a tool call are an object, and an absent value is a missing key rather than null. Few templates know the role
`developer`.
"""  # decider

import hashlib
import itertools
import json
import re
from typing import Annotated, Any

import msgspec

from dynamo.base import errors
from dynamo.preprocess import images
from dynamo.runtime.http import json_body

ROLES = ("developer", "system", "user", "assistant", "tool")
MAX_TOOL_NAME = 128
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
MAX_MESSAGES = 100_000  # Anthropic's limit; OpenAI publishes none
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
_END_MARK = "\u2063CONTINUE HERE\u2063"  # no text of a person has it
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ROLES = frozenset(ROLES)
_LEADING_ROLES = ("system", "developer")
_MEDIA = frozenset(("input_audio", "audio_url", "video_url", "file", "image", "audio"))


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raise InvalidRequest, which names the message and its key, for a message of the wrong form."""
    if not messages:
        raise errors.InvalidRequest(
            "The 'messages' field cannot be empty. At least one message is required.",
            param="messages",
        )
    are_plain = True
    for number, message in enumerate(messages):
        role = message.get("role")
        if type(role) is not str or role not in _ROLES:
            raise _wrong(f"messages[{number}].role", "one of " + ", ".join(ROLES), message, "role")
        if type(message.get("content")) is not str or len(message) > 2:
            _check_rest(message, role, f"messages[{number}]")
            are_plain = False
    if not are_plain:
        check_arguments(messages)


def check_arguments(messages: list[dict[str, Any]]) -> None:
    """Raise InvalidRequest for too many lists and objects in the arguments of calls, which templates get decoded."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    functions = (call.get("function") for call in calls)
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    json_body.check_structure(
        *(text.encode(errors="replace") for text in texts if isinstance(text, str))
    )


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise InvalidRequest, which names the tool and its key, for a tool of the wrong form."""
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            raise _wrong(f"{place}.type", "'function' or 'custom'", tool, "type")
        function = tool.get(kind)
        if not isinstance(function, dict):
            raise _wrong(f"{place}.{kind}", "an object", tool, kind)
        name = function.get("name")
        if type(name) is not str or not 0 < len(name) <= MAX_TOOL_NAME:
            expected = f"a string of 1 to {MAX_TOOL_NAME} characters"
            raise _wrong(f"{place}.{kind}.name", expected, function, "name")


def name_of(tool: dict[str, Any]) -> Any:
    kind = tool.get("type", "function")
    described = tool.get(kind) if isinstance(kind, str) else None
    return described.get("name") if isinstance(described, dict) else None


def to_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool as a function without nulls: a custom one has a text as its only argument.

    The grammar of a custom tool is told to the model, and not enforced.
    """
    if tool["type"] != "custom":
        function = tool["function"]
        if None not in function.values():
            return tool
        given = {key: value for key, value in function.items() if value is not None}
        return {**tool, "function": given}
    custom = tool["custom"]
    form = custom.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    texts = (custom.get("description"), definition)
    description = "\n\n".join(text for text in texts if isinstance(text, str))
    function = {"name": custom["name"], "parameters": CUSTOM_PARAMETERS}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def complete_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions with all that some templates read without a test: a description and parameters."""
    return [
        {**tool, "function": _complete_function(tool["function"])} if "function" in tool else tool
        for tool in tools
    ]


def _complete_function(function: dict[str, Any]) -> dict[str, Any]:
    completed, parameters = {"description": "", **function}, function.get("parameters") or {}
    if isinstance(parameters, dict):
        completed["parameters"] = {"type": "object", "properties": {}, **parameters}
    return completed


def custom_input(arguments: str) -> str:
    """Return the text that a call of a custom tool carries."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str]).get("input", "")
    except msgspec.DecodeError:
        return arguments


def adapt_for_template(
    messages: list[dict[str, Any]],
    *,
    knows_developer: bool = False,
    wants_text_arguments: bool = False,
    reads_thinking: bool = False,
    reads_null: bool = True,
) -> list[dict[str, Any]]:
    """Return the messages in the form of chat templates, without changing any in place.

    A message with images has a list of parts; with `wants_text_arguments` the arguments of a call are a text of JSON;
    with `reads_thinking` the thoughts of an answer are its `thinking`, too. The content of a call without a text is
    null with `reads_null`, for templates that know calls by it, and else the empty text: most templates would write the
    word None, or fail.
    """
    empty = None if reads_null else ""
    return [
        message
        if _is_plain(message)
        else _fill(_adapt(message, knows_developer, wants_text_arguments, reads_thinking), empty)
        for message in messages
    ]


def lead_with_instructions(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return adapted messages with all instructions in one message at the beginning; None if they stand there already.

    Agents send several, also later in a conversation, and many templates raise an error for any but a first one, or
    leave it out.
    """
    leads = [message for message in messages if message.get("role") in _LEADING_ROLES]
    if leads in ([], messages[:1]):
        return None
    contents = [message.get("content") for message in leads]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part["type"] != "text" for part in parts):  # an image that moves would be another one's
        return None
    text = "\n\n".join(filter(None, map(text_of, contents)))
    lead = {**leads[0], "content": [{"type": "text", "text": text}] if parts else text}
    return [lead, *(message for message in messages if message.get("role") not in _LEADING_ROLES)]


def has_instructions(prompt: str, messages: list[dict[str, Any]]) -> bool:
    """Return whether a prompt has all instructions in their order; gpt-oss's template leaves later ones out."""
    start = 0  # the rest alone is searched: there may be as many instructions as tokens
    for message in messages:
        if start >= 0 and message.get("role") in _LEADING_ROLES:
            start = prompt.find(text_of(message.get("content")).strip(), start)
    return start >= 0


def to_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return adapted messages as turns of user and assistant, as some templates want; None if they are that already.

    Neighbours of one role are joined, and a short answer, the one of Mistral's own client, stands between the result
    of a tool and the words of the user.
    """
    turns: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, _turn_of):
        run = list(group)
        if role and len(run) > 1:
            contents = [message.get("content") for message in run]
            texts = [content for content in contents if isinstance(content, str)]
            parts = [part for content in contents for part in _parts_of(content)]
            joined = "\n\n".join(texts) if len(texts) == len(run) else parts
            run = [{**run[0], "content": joined}]
        if (
            role == "user"
            and turns
            and (turns[-1]["role"] == "tool" or turns[-1].get("tool_calls"))
        ):
            turns.append({"role": "assistant", "content": "Understood."})
        turns += run
    return turns if turns != messages else None


def _turn_of(message: dict[str, Any]) -> str | None:
    role: str = message["role"]
    return role if role in ("user", "assistant") and not message.get("tool_calls") else None


def _parts_of(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def split_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with at most one call in each, and its results behind it.

    Some templates refuse several calls in a message, and others leave out all but the first.
    """
    groups: list[list[dict[str, Any]]] = []  # a call and its results, or a message without
    by_call: dict[Any, list[dict[str, Any]]] = {}
    for message in messages:
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if isinstance(call_id, str) and call_id in by_call:
                by_call[call_id].append(message)
                continue
        else:
            by_call = {}
        if len(calls := message.get("tool_calls") or ()) < 2:
            groups.append([message])
            continue
        for call in calls:
            groups.append([{**message, "tool_calls": [call]}])
            by_call[str(call.get("id"))] = groups[-1]
            message = {"role": "assistant", "content": None}
    return list(itertools.chain.from_iterable(groups))


def split_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a list of parts in the place of each text, as some templates for images want them."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def name_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of calls that name the tool and count all calls, as `functions.weather:0` does.

    Kimi's templates write the id in the place of the name: a model that reads another one does not learn what was
    called, and writes such ids itself.
    """
    numbers = itertools.count()
    names: dict[str, str] = {}  # by the client's id
    named = []
    for message in messages:
        call_id = message.get("tool_call_id")
        if isinstance(call_id, str):
            message = {**message, "tool_call_id": names.get(call_id, call_id)}
        if calls := message.get("tool_calls"):
            ids = [f"functions.{call['function']['name']}:{next(numbers)}" for call in calls]
            pairs = list(zip(calls, ids, strict=True))
            message = {**message, "tool_calls": [{**call, "id": name} for call, name in pairs]}
            names |= {call["id"]: name for call, name in pairs if isinstance(call.get("id"), str)}
        named.append(message)
    return named


def shorten_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of calls that have nine letters and digits, as ours do.

    Mistral's templates refuse others, which a client brings from another server.
    """
    shortened = []
    for message in messages:
        if isinstance(call_id := message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": _short_id(call_id)}
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": _short_id(str(call.get("id")))} for call in calls]
            message = {**message, "tool_calls": calls}
        shortened.append(message)
    return shortened


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text, parts of which some are texts, or nothing."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a mark at the end of the last one, which a model continues. Raises InvalidRequest."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content:
        raise errors.InvalidRequest.of_param(
            "continue_final_message", "expected a last message with a text, got one without"
        )
    return [*messages[:-1], {**messages[-1], "content": content + _END_MARK}]


def cut_at_mark(prompt: str) -> str:
    """Return the prompt up to the mark of `mark_end`. Raises InvalidRequest if the template has left it out."""
    text, mark, _ = prompt.rpartition(_END_MARK)
    if not mark:
        raise errors.InvalidRequest.of_param(
            "continue_final_message", "this model's chat template leaves the last message out"
        )
    return text


def extract_raw_prompt(messages: list[dict[str, Any]]) -> str:
    """Return the text of the only message, to which the caller has applied a template. Raises InvalidRequest."""
    content = adapt_for_template(messages)[0].get("content")
    if len(messages) != 1 or not isinstance(content, str):
        raise errors.InvalidRequest.of_param(
            "nvext.use_raw_prompt",
            f"expected one message with a text, which is the prompt, got {len(messages)}",
        )
    return content


def _parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call; none, if they are no object written as JSON, as with vLLM.

    A model wrote them, and a conversation with a call that was cut off must be able to go on.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}


def _check_rest(message: dict[str, Any], role: str, place: str) -> None:
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(content, f"{place}.content")
    elif type(content) is not str and not (content is None and role == "assistant"):
        raise _wrong(f"{place}.content", "a string or a list of parts", message, "content")
    if message.get("tool_calls") is not None:
        _check_tool_calls(message, place)
    for key in ("audio", "function_call"):
        if message.get(key) is not None:
            raise errors.InvalidRequest.of_param(f"{place}.{key}", "not supported; leave it out")


def _check_parts(parts: list[Any], place: str) -> None:
    for number, part in enumerate(parts):
        part_place = f"{place}[{number}]"
        if not isinstance(part, dict):
            raise errors.InvalidRequest.of_param(
                part_place, f"expected an object, got {json_body.describe(part)}"
            )
        kind = part.get("type")
        if kind == images.PART:
            images.check_part(part, part_place)
            continue
        if type(kind) is str and kind in _MEDIA:
            raise errors.InvalidRequest.of_param(
                f"{part_place}.type", f"this model reads text only; expected 'text', got {kind!r}"
            )
        if kind not in ("text", "refusal"):
            raise _wrong(f"{part_place}.type", "'text'", part, "type")
        if type(part.get(kind)) is not str:
            raise _wrong(f"{part_place}.{kind}", "a string", part, kind)


def _check_tool_calls(message: dict[str, Any], place: str) -> None:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise _wrong(f"{place}.tool_calls", "a list", message, "tool_calls")
    for number, call in enumerate(calls):
        call_place = f"{place}.tool_calls[{number}]"
        if isinstance(call, dict) and isinstance(call.get("custom"), dict):
            continue
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise errors.InvalidRequest(
                f"{call_place}: expected an object with `function`", param=f"{call_place}.function"
            )
        function = call["function"]
        if type(function.get("name")) is not str:
            raise _wrong(f"{call_place}.function.name", "a string", function, "name")
        if not isinstance(function.get("arguments", ""), str | dict):
            param = f"{call_place}.function.arguments"
            raise _wrong(param, "a string of JSON", function, "arguments")


def _wrong(param: str, expected: str, owner: dict[str, Any], key: str) -> errors.InvalidRequest:
    actual = f"got {json_body.describe(owner[key])}" if key in owner else "but it is missing"
    return errors.InvalidRequest.of_param(param, f"expected {expected}, {actual}")


def _is_plain(message: dict[str, Any]) -> bool:
    return (
        len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") != "developer"
    )


def _fill(message: dict[str, Any], empty: str | None) -> dict[str, Any]:
    """Return a message that has this content if it has no text of its own."""
    content = message["content"]
    has_no_text = content is None or (content == "" and "tool_calls" in message)
    return {**message, "content": empty} if has_no_text else message


def _adapt(
    message: dict[str, Any], knows_developer: bool, wants_text_arguments: bool, reads_thinking: bool
) -> dict[str, Any]:
    adapted = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    adapted.setdefault("content", None)  # an assistant's, which some clients leave out beside calls
    if adapted["role"] == "developer" and not knows_developer:
        adapted["role"] = "system"
    if isinstance(content := adapted.get("content"), list):
        adapted["content"] = _adapt_parts(content)
    if calls := adapted.get("tool_calls"):
        adapted["tool_calls"] = [_adapt_call(call, wants_text_arguments) for call in calls]
    elif calls is not None:
        del adapted["tool_calls"]
    thoughts = adapted.get("reasoning_content") or adapted.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        names = ["reasoning_content", "reasoning"]  # vLLM has both, and templates read either
        # gpt-oss's, which reads `thinking`, takes none beside the content of a message with calls
        if reads_thinking and not (calls and adapted.get("content")):
            names.append("thinking")
        adapted |= {name: adapted.get(name) or thoughts for name in names}
    return adapted


def _adapt_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the text of the parts, or, with images, the parts as templates for images know them."""
    if all(part["type"] != images.PART for part in parts):
        return "\n".join(part[part["type"]] for part in parts)
    return [
        {"type": "image"}
        if part["type"] == images.PART
        else {"type": "text", "text": part[part["type"]]}
        for part in parts
    ]


def _adapt_call(call: dict[str, Any], wants_text_arguments: bool) -> dict[str, Any]:
    if custom := call.get("custom"):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        call = {"id": call.get("id"), "type": "function"}
    else:
        function = call["function"]
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments)
    if wants_text_arguments:
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            arguments = "{}"
    return {**call, "function": {**function, "arguments": arguments}}
