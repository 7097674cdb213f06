"""A hook of schemathesis: requests are for the model that is served, and for few tokens; what is wrong stays wrong.

The model reads text only, so images become texts.
"""

import os

import schemathesis


@schemathesis.hook
def map_body(context, body):
    del context
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and body["model"]:
            body["model"] = os.environ["SERVED_MODEL"]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > 8:
                body[name] = 8
        if isinstance(body.get("n"), int) and 2 < body["n"] <= 128:
            body["n"] = 2
    return body


@schemathesis.hook
def before_call(context, case, kwargs):
    """Make texts of images, in boundary values, too."""
    del context, kwargs
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(files := body.get("images"), list):
        body["images"] = [file for file in files if not isinstance(file, str)]
    if isinstance(messages := body.get("messages"), list):
        body["messages"] = [_as_text(message) for message in messages]


def _as_text(message):
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = [
        {"type": "text", "text": "an image"} if _is_image(part) else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _is_image(part):
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return False
    described = part.get("image_url")
    url = described.get("url") if isinstance(described, dict) else described
    return isinstance(url, str) and url.startswith("data:image/")
