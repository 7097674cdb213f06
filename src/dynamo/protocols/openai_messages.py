"""The messages and tools of a chat request: what is allowed in them.

They are dictionaries, because chat templates walk through them; keys that nobody here knows go to the template.
"""

from typing import Annotated, Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_decode

ROLES = ("developer", "system", "user", "assistant", "tool")
MAX_TOOL_NAME = 64
MAX_MESSAGES = 100_000  # as Anthropic's API has it; OpenAI's has no published number
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
_ROLES = frozenset(ROLES)
_MEDIA = frozenset(("image_url", "input_audio", "audio_url", "video_url", "file", "image", "audio"))


def check(messages: list[dict[str, Any]]) -> None:
    """Raises InvalidRequest, which names the message and its key."""
    if not messages:
        raise errors.InvalidRequest(
            "The 'messages' field cannot be empty. At least one message is required.",
            param="messages",
        )
    for number, message in enumerate(messages):
        role = message.get("role")
        if type(role) is not str or role not in _ROLES:
            raise _wrong(f"messages[{number}].role", "one of " + ", ".join(ROLES), message, "role")
        if type(message.get("content")) is not str or len(message) > 2:
            _check_rest(message, role, f"messages[{number}]")


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
            raise errors.InvalidRequest(
                f"{place}.{key}: not supported; leave it out", param=f"{place}.{key}"
            )


def _check_parts(parts: list[Any], place: str) -> None:
    for number, part in enumerate(parts):
        here = f"{place}[{number}]"
        if not isinstance(part, dict):
            raise errors.InvalidRequest(
                f"{here}: expected an object, got {openai_decode.describe(part)}", param=here
            )
        kind = part.get("type")
        if type(kind) is str and kind in _MEDIA:
            raise errors.InvalidRequest(
                f"{here}.type: this model reads text only; expected 'text', got {kind!r}",
                param=f"{here}.type",
            )
        if kind not in ("text", "refusal"):
            raise _wrong(f"{here}.type", "'text'", part, "type")
        if type(part.get(kind)) is not str:
            raise _wrong(f"{here}.{kind}", "a string", part, kind)


def _check_tool_calls(message: dict[str, Any], place: str) -> None:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise _wrong(f"{place}.tool_calls", "a list", message, "tool_calls")
    for number, call in enumerate(calls):
        here = f"{place}.tool_calls[{number}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise errors.InvalidRequest(
                f"{here}: expected an object with `function`", param=f"{here}.function"
            )
        function = call["function"]
        if type(function.get("name")) is not str:
            raise _wrong(f"{here}.function.name", "a string", function, "name")
        if not isinstance(function.get("arguments", ""), str | dict):
            raise _wrong(f"{here}.function.arguments", "a string of JSON", function, "arguments")


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raises InvalidRequest, which names the tool and its key."""
    for number, tool in enumerate(tools):
        here = f"tools[{number}]"
        if tool.get("type") != "function":
            raise _wrong(f"{here}.type", "'function'", tool, "type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{here}.function", "an object", tool, "function")
        name = function.get("name")
        if type(name) is not str or not 0 < len(name) <= MAX_TOOL_NAME:
            wanted = f"a string of 1 to {MAX_TOOL_NAME} characters"
            raise _wrong(f"{here}.function.name", wanted, function, "name")


def _wrong(param: str, expected: str, owner: dict[str, Any], key: str) -> errors.InvalidRequest:
    got = f"got {openai_decode.describe(owner[key])}" if key in owner else "but it is missing"
    return errors.InvalidRequest(f"{param}: expected {expected}, {got}", param=param)
