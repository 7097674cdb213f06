"""A hook of schemathesis: requests are for the model that is served, and for few tokens; what is wrong stays wrong."""

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
