"""Answers that the router gives itself, as chat completions: refusals, cache hits, the list of models."""  # decider

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo.runtime.http import json_body

Headers = Sequence[tuple[str, str]]
EVENT_STREAM = "text/event-stream"
_JSON = "application/json"
_DONE = b"data: [DONE]\n\n"
NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_ANTHROPIC_KINDS = {413: "request_too_large"}
SERVER_FIELDS = ("system_fingerprint", "service_tier")  # of an answer and of each of its chunks
_encode = msgspec.json.encode
FAILURE = "error"  # the label of a guard that failed
_UNREAD = (
    "This request was not processed: the guard that reads it first has failed. Ask again later."
)


class ImmediateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer."""

    status: int
    content_type: str
    body: bytes
    headers: list[tuple[str, str]] = []


def refuse_pii(
    labels: Sequence[str], decision: str, category: str, created: int, *, is_stream: bool
) -> ImmediateAnswer:
    """Return the answer to a request with personal data that its decision does not allow."""
    kinds = ", ".join(label.removeprefix("B-") for label in labels)
    content = (
        f"This request was not processed: it contains personal data [{kinds}], which the privacy policy of "
        f"{decision} does not allow. Remove it and ask again."
    )
    if FAILURE in labels:
        content = _UNREAD
    headers = [
        ("x-vsr-pii-violation", "true"),
        ("x-vsr-pii-types", ",".join(labels)),
        ("x-vsr-selected-decision", decision),
        ("x-vsr-selected-category", category),
    ]
    identity = f"chatcmpl-pii-violation-{created}"
    return _answer(identity, decision, content, created, headers, is_stream=is_stream)


def refuse_attack(
    kind: str, confidence: float, created: int, *, is_stream: bool
) -> ImmediateAnswer:
    """Return the answer to a request that was taken for an attack."""
    content = (
        f"This request was not processed: it looks like an attack on the model's instructions "
        f"({kind}, confidence {confidence:.3f}). Rephrase it and ask again."
    )
    if kind == FAILURE:
        content = _UNREAD
    headers = [
        ("x-vsr-jailbreak-blocked", "true"),
        ("x-vsr-jailbreak-type", kind),
        ("x-vsr-jailbreak-confidence", f"{confidence:.3f}"),
    ]
    identity = f"chatcmpl-jailbreak-blocked-{created}"
    return _answer(identity, "security-filter", content, created, headers, is_stream=is_stream)


def replay(
    body: bytes,
    created: int,
    headers: list[tuple[str, str]],
    *,
    is_stream: bool,
    wants_usage: bool = False,
) -> ImmediateAnswer:
    """Return a cached completion with a new id and time; as a stream, word by word, with its usage if wanted."""
    completion = msgspec.json.decode(body)
    completion |= {"id": f"chatcmpl-cache-{created}", "created": created}
    if not is_stream:
        return ImmediateAnswer(
            status=200, content_type=_JSON, body=_encode(completion), headers=headers
        )
    head = {key: completion.get(key) for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    head |= {name: completion[name] for name in SERVER_FIELDS if name in completion}
    tail = {"usage": None} if wants_usage else {}  # as servers have it in each chunk but the last
    data = b"".join(
        _event(head, choice["index"], delta, finish, tail)
        for choice in completion["choices"]
        for delta, finish in _deltas(choice)
    )
    if wants_usage:
        last = {**head, "choices": [], "usage": completion.get("usage") or NO_USAGE}
        data += b"data: " + json_body.encode_inline(last) + b"\n\n"
    return ImmediateAnswer(
        status=200, content_type=EVENT_STREAM, body=data + _DONE, headers=headers
    )


def list_models(names: Sequence[str], created: int) -> ImmediateAnswer:
    """Return the list of the models that a client may name; the first lets the router choose."""
    descriptions = ["The router chooses a model for each request", *[""] * len(names)]
    rows = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm-semantic-router",
            **({"description": text} if text else {}),
        }
        for name, text in zip(names, descriptions, strict=False)
    ]
    return ImmediateAnswer(
        status=200, content_type=_JSON, body=_encode({"object": "list", "data": rows})
    )


def refuse(
    status: int,
    message: str,
    kind: str,
    *,
    api: str = "chat",
    param: str | None = None,
    headers: Headers = (),
) -> ImmediateAnswer:
    """Return an error in the shape of an API: Anthropic's (`messages`), a text (`ollama`, `kserve`), or OpenAI's."""
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    body: dict[str, Any] = {"error": error}
    if api == "messages":
        kind = "api_error" if status >= 500 else _ANTHROPIC_KINDS.get(status, kind)
        body = {"type": "error", "error": {"type": kind, "message": message}}
    elif api in ("ollama", "ollama_generate", "kserve"):
        body = {"error": message}
    return ImmediateAnswer(
        status=status, content_type=_JSON, body=_encode(body), headers=list(headers)
    )


def _answer(
    identity: str,
    model: str,
    content: str,
    created: int,
    headers: list[tuple[str, str]],
    *,
    is_stream: bool,
) -> ImmediateAnswer:
    head: dict[str, Any] = {"id": identity, "created": created, "model": model}
    message = {"role": "assistant", "content": content}
    if is_stream:
        head["object"] = "chat.completion.chunk"
        data = _event(head, 0, message, "content_filter") + _DONE
        kind = EVENT_STREAM
    else:
        choice = {"index": 0, "message": message, "finish_reason": "content_filter"}
        head |= {"object": "chat.completion", "choices": [choice], "usage": NO_USAGE}
        data, kind = _encode(head), _JSON
    return ImmediateAnswer(status=200, content_type=kind, body=data, headers=headers)


def _event(
    head: dict[str, Any],
    index: int,
    delta: dict[str, Any],
    finish: str | None,
    tail: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + json_body.encode_inline({**head, "choices": [choice], **tail}) + b"\n\n"


def _deltas(choice: dict[str, Any]) -> list[tuple[dict[str, Any], str | None]]:
    message = choice["message"]
    words = re.findall(r"\S+\s*|\s+", message.get("content") or "")
    others = {k: v for k, v in message.items() if k not in ("content", "refusal") and v}
    return [
        (others, None),
        *(({"content": word}, None) for word in words),
        ({}, choice.get("finish_reason") or "stop"),
    ]
