"""A hook of schemathesis: requests are for the model that is served, and for few tokens; what is wrong stays wrong.

The model reads text only, so images become texts.
"""

import os

import schemathesis

VOCAB_SIZE = 4096  # of the simulated model
MIN_BUDGET = 1024  # tokens for thinking, of Anthropic's API


@schemathesis.hook
def map_body(context, body):
    del context
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and body["model"]:
            body["model"] = os.environ["SERVED_MODEL"]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > 8:
                body[name] = 8
        for name, most in (("n", 128), ("min_tokens", 2**32 - 1)):
            value = body.get(name)  # 6.0 is as good as 6
            if isinstance(value, int | float) and value % 1 == 0 and 2 < value <= most:
                body[name] = 2
        if isinstance(body.get("previous_response_id"), str):
            del body["previous_response_id"]
        match body.get("thinking"):
            case {"budget_tokens": int(budget)} if budget >= MIN_BUDGET:
                body["thinking"]["budget_tokens"], body["max_tokens"] = MIN_BUDGET, MIN_BUDGET + 8
        _name_known_tokens(body)
    return body


@schemathesis.hook
def before_call(context, case, kwargs):
    """Make texts of images, in boundary values, too, precede results of tools by their calls, and force no tool."""
    del context, kwargs
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(files := body.get("images"), list):
        body["images"] = [file for file in files if not isinstance(file, str)]
    for name in ("messages", "input"):
        if isinstance(messages := body.get(name), list):
            body[name] = _as_texts(messages)
    if calls := [*_find_calls(body.get("messages"))]:
        body["messages"].insert(0, {"role": "assistant", "content": calls})
    match body.get("output_config") or body.get("text"):
        case {"format": {"type": "json_schema", "schema": dict()}} as options:
            del options["format"]  # the simulated engine holds to no grammar
    if "tool_choice" in body:
        body["tool_choice"] = _without_forced_tool(body["tool_choice"])


def _name_known_tokens(body):
    for name in ("prompt", "stop_token_ids", "allowed_token_ids"):
        if name in body:
            body[name] = _with_known_ids(body[name])
    if isinstance(biases := body.get("logit_bias"), dict):
        names = {name: str(int(name) % VOCAB_SIZE) for name in biases if name.isdecimal()}
        body["logit_bias"] = {names.get(name, name): bias for name, bias in biases.items()}


def _with_known_ids(prompt):
    """Return a prompt, or a list of prompts, with tokens of the model in the places of other tokens."""
    if isinstance(prompt, list):
        return [_with_known_ids(inner) for inner in prompt]
    is_token = type(prompt) in (int, float) and 0 <= prompt < 2**32
    return prompt % VOCAB_SIZE if is_token else prompt


def _without_forced_tool(choice):
    """Return a `tool_choice` that forces no tool, for which the engine would have to hold to a grammar."""
    match choice:
        case "required":
            return "auto"
        case {"type": "any" | "tool"}:
            return {**choice, "type": "auto", "name": None}
        case {"type": "function" | "custom", "name": str()}:
            return {"mode": "auto", "tools": [], **choice, "type": "allowed_tools"}
        case {"type": "function" | "custom" as kind} if isinstance(choice.get(kind), dict):
            allowed = {"allowed_tools": {"mode": "auto", "tools": []}}
            return {**allowed, **choice, "type": "allowed_tools"}
    return choice


def _as_texts(value):
    """Return a message, or its content or parts, with texts in the places of images."""
    if isinstance(value, list):
        return [_as_texts(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)} if _is_image(url):
            return {"type": "text", "text": "an image"}
        case {"type": "input_image", "image_url": str(url)} if _is_image(url):
            return {"type": "input_text", "text": "an image"}
        case {"type": "image", "source": {"type": "base64", "media_type": str(), "data": str()}}:
            return {"type": "text", "text": "an image"}
    return {key: _as_texts(inner) if key in _CONTENTS else inner for key, inner in value.items()}


_CONTENTS = ("content", "output")


def _is_image(url):
    return url.startswith("data:image/")


def _find_calls(messages):
    """Yield a tool call for each result of a tool in messages of Anthropic's form."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            match block:
                case {"type": "tool_result", "tool_use_id": str(call_id)}:
                    yield {"type": "tool_use", "id": call_id, "name": "tool", "input": {}}
