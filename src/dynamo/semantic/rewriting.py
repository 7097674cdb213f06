"""Changes of a request's JSON: model, reasoning, system prompt and tools. All else stays byte for byte."""  # decider

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.semantic import config, json_splice, request_view

_encode = msgspec.json.encode


def set_model(body: bytes, model: str) -> bytes:
    """Return the body with another model."""
    return json_splice.change_object(body, {"model": _encode(model)})


def set_reasoning(
    body: bytes,
    fields: dict[str, Any],
    family: config.ReasoningFamily | None,
    *,
    effort: str | None,
) -> bytes:
    """Return the body with reasoning on, at an effort, or off (None), in the way of the model's family.

    Without a family nothing is changed.
    """
    if family is None:
        return body
    requested = fields.get("reasoning_effort")
    if family.type == "reasoning_effort":
        level = effort or (requested if isinstance(requested, str) else "low")
        return json_splice.change_object(body, {"reasoning_effort": _encode(level)})
    raw = _member(body, "chat_template_kwargs")
    value = {family.parameter: b"false" if effort is None else b"true"}
    keeps = raw is not None and raw.startswith(b"{")
    arguments = json_splice.change_object(raw if keeps and raw else b"{}", value)
    return json_splice.change_object(
        body, {"reasoning_effort": None, "chat_template_kwargs": arguments}
    )


def set_tools(body: bytes, definitions: Sequence[bytes]) -> bytes:
    """Return the body with these tools in place of its own, each as JSON; without any tools if there are none."""
    if definitions:
        return json_splice.change_object(body, {"tools": b"[" + b",".join(definitions) + b"]"})
    names = ("tools", "tool_choice", "parallel_tool_calls")  # a server refuses the rest alone
    return json_splice.change_object(body, dict.fromkeys(names))


def set_system_prompt(
    body: bytes, view: request_view.RequestView, prompt: str, *, is_inserted: bool
) -> bytes:
    """Return the body with the system prompt replaced, or put before what the client's says."""
    if view.messages_field == "prompt":
        return body  # a plain completion has no system prompt
    for name in ("instructions", "system"):  # of responses, and of Anthropic's messages
        if name in view.fields or (name == "instructions" and view.messages_field == "input"):
            raw = _member(body, name) or b'""'
            changed = _content(raw, prompt, is_inserted=is_inserted)
            return json_splice.change_object(body, {name: changed})
    messages = _member(body, "messages")
    if messages is None or not messages.startswith(b"["):
        return body
    first = view.messages[0] if view.messages else {}
    if first.get("role") in ("system", "developer"):  # a template takes one of them
        item = json_splice.members(messages)[0]
        message = messages[item.value : item.end]
        raw = _member(message, "content") or b'""'
        content = _content(raw, prompt, is_inserted=is_inserted)
        message = json_splice.change_object(message, {"content": content})
        messages = json_splice.replace_item(messages, 0, message)
    else:
        message = _encode({"role": "system", "content": prompt})
        messages = json_splice.prepend_item(messages, message)
    return json_splice.change_object(body, {"messages": messages})


def _content(raw: bytes, prompt: str, *, is_inserted: bool) -> bytes:
    """Return the content of a system message with the prompt; parts stay parts."""
    if not is_inserted:
        return _encode(prompt)
    if raw.startswith(b"["):
        return json_splice.prepend_item(raw, _encode({"type": "text", "text": prompt + "\n\n"}))
    content = msgspec.json.decode(raw)
    return _encode(f"{prompt}\n\n{content}" if content else prompt)


def _member(body: bytes, name: str) -> bytes | None:
    """Return the JSON of a member of an object; None if there is none. The last of several counts."""
    values = [body[m.value : m.end] for m in json_splice.members(body) if m.name == name]
    return values[-1] if values else None
