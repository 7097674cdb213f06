"""From the messages of the API to what chat templates expect.

Templates are written for Hugging Face's form, which differs in little: content is one text, the arguments of a tool
call are an object, and what is not there is absent rather than null. Few templates know the role `developer`.
"""

from typing import Any

import msgspec

from dynamo.base import errors


def for_template(
    messages: list[dict[str, Any]], *, knows_developer: bool = False
) -> list[dict[str, Any]]:
    """The messages, in the template's form; none is changed in place. Raises InvalidRequest."""
    return [
        message if _is_plain(message) else _adapt(message, f"messages[{number}]", knows_developer)
        for number, message in enumerate(messages)
    ]


def raw_prompt(messages: list[dict[str, Any]]) -> str:
    """The text of the one message, for a caller who has applied a template already. Raises InvalidRequest."""
    content = for_template(messages)[0].get("content")
    if len(messages) != 1 or not isinstance(content, str):
        raise errors.InvalidRequest(
            f"nvext.use_raw_prompt: expected one message with a text, which is the prompt, got {len(messages)}",
            param="nvext.use_raw_prompt",
        )
    return content


def _is_plain(message: dict[str, Any]) -> bool:
    return (
        len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") != "developer"
    )


def _adapt(message: dict[str, Any], place: str, knows_developer: bool) -> dict[str, Any]:
    adapted = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    if adapted["role"] == "developer" and not knows_developer:
        adapted["role"] = "system"
    if isinstance(content := adapted.get("content"), list):
        adapted["content"] = "\n".join(part[part["type"]] for part in content)
    if calls := adapted.get("tool_calls"):
        adapted["tool_calls"] = [
            _adapt_call(call, f"{place}.tool_calls[{number}].function.arguments")
            for number, call in enumerate(calls)
        ]
    elif calls is not None:
        del adapted["tool_calls"]
    return adapted


def _adapt_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments, place)
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(text: str, place: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.InvalidRequest(
            f"{place}: expected an object written as JSON: {error}", param=place
        ) from error
