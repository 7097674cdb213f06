"""Changes of a request's JSON: model, reasoning, system prompt and tools. All else stays byte for byte."""  # decider

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.semantic import config, json_splice, request_view

RequestApi = request_view.RequestApi
_OLLAMA = ("ollama", "ollama_generate")
_encode = msgspec.json.encode
_SWITCHES = ("enable_thinking", "thinking")  # of templates; servers set these for the other APIs
# Efforts that an API has no word for, and the next one that it has.
_MESSAGES_EFFORTS = {"none": "low", "minimal": "low"}
_OLLAMA_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "max"}


def set_model(body: bytes, model: str) -> bytes:
    return json_splice.change_object(body, {"model": _encode(model)})


def can_set_reasoning(
    api: RequestApi, fields: Mapping[str, Any], family: config.ReasoningFamily | None
) -> bool:
    """Return whether a request has a field that turns the reasoning of this family on and off.

    Chat completions take any argument of a template. The other APIs have a switch of their own, which their servers
    translate to the usual ones.
    """
    if api in ("completions", "other") or (api in _OLLAMA and fields.get("raw") is True):
        return False
    is_usual = family is None or family.type == "reasoning_effort" or family.parameter in _SWITCHES
    return api == "chat" or is_usual


def set_reasoning(
    body: bytes,
    fields: Mapping[str, Any],
    family: config.ReasoningFamily | None,
    *,
    effort: str | None,
    api: RequestApi = "chat",
) -> bytes:
    """Return the body with reasoning on, at an effort, or off (None), in the way of the model's family and of the API.

    Models of a family by effort always reason: off is the request's own effort, else a low one. Without a family
    nothing is changed.
    """
    if family is None:
        return body
    switch = None if family.type == "reasoning_effort" else family.parameter
    if api == "responses":
        level = effort or ("none" if switch else _effort_of(fields.get("reasoning"), "low"))
        return _change_member(body, "reasoning", {"effort": _encode(level)})
    if api == "messages":
        return _set_thinking(body, fields, effort, has_switch=switch is not None)
    if api in _OLLAMA:
        think = fields.get("think")
        level = effort or (think if isinstance(think, str) else "low")
        value = effort is not None if switch else _OLLAMA_EFFORTS.get(level, level)
        return json_splice.change_object(body, {"think": _encode(value)})
    if switch is None:
        level = effort or _effort_of({"effort": fields.get("reasoning_effort")}, "low")
        return json_splice.change_object(body, {"reasoning_effort": _encode(level)})
    body = json_splice.change_object(body, {"reasoning_effort": None})
    return _change_member(body, "chat_template_kwargs", {switch: _encode(effort is not None)})


def _set_thinking(
    body: bytes, fields: Mapping[str, Any], effort: str | None, *, has_switch: bool
) -> bytes:
    """Return a body of Anthropic's messages with thinking on or off; its own budget stays."""
    thinking, output = fields.get("thinking"), fields.get("output_config")
    is_on = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
    if effort is not None and not is_on:
        body = json_splice.change_object(body, {"thinking": _encode({"type": "adaptive"})})
    if not has_switch:
        level = effort or _effort_of(output, "low")
        level = _MESSAGES_EFFORTS.get(level, level)
        return _change_member(body, "output_config", {"effort": _encode(level)})
    if effort is None:
        body = json_splice.change_object(body, {"thinking": _encode({"type": "disabled"})})
    if isinstance(output, dict) and "effort" in output:
        return _change_member(body, "output_config", {"effort": None})
    return body


def _effort_of(options: Any, usual: str) -> str:
    """Return the effort that a request asks for."""
    effort = options.get("effort") if isinstance(options, dict) else None
    return effort if isinstance(effort, str) else usual


def _change_member(body: bytes, name: str, changes: Mapping[str, bytes | None]) -> bytes:
    """Return the body with a member that is an object changed; another value gives way to one."""
    raw = _member(body, name)
    inner = raw if raw is not None and raw.startswith(b"{") else b"{}"
    return json_splice.change_object(body, {name: json_splice.change_object(inner, changes)})


def set_tools(body: bytes, definitions: Sequence[bytes]) -> bytes:
    """Return the body with these tools in place of its own, each as JSON; without any tools if there are none."""
    if definitions:
        return json_splice.change_object(body, {"tools": b"[" + b",".join(definitions) + b"]"})
    names = ("tools", "tool_choice", "parallel_tool_calls")  # a server refuses the rest alone
    return json_splice.change_object(body, dict.fromkeys(names))


def set_system_prompt(
    body: bytes,
    view: request_view.RequestView,
    prompt: str,
    *,
    is_inserted: bool,
    api: RequestApi = "chat",
) -> bytes:
    """Return the body with the system prompt replaced, or put before what the client's says.

    It is the very object that came if the request has no place for one.
    """
    is_generation = view.messages_field == "prompt"
    if is_generation and (api not in _OLLAMA or view.fields.get("raw") is True):
        return body  # a plain completion has no system prompt
    field = "instructions" if view.messages_field == "input" else ""
    if is_generation or api == "messages":  # it knows no role of that name
        field = "system"
    if field:
        raw = _member(body, field) or b'""'
        changed = _content(raw, prompt, is_inserted=is_inserted)
        return json_splice.change_object(body, {field: changed})
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
