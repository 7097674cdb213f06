"""The request of `POST /v1/chat/completions`."""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.preprocess import inputs
from dynamo.runtime.http import json_body


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer that the caller expects. It may save time and never changes the answer."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(inputs.Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation, with the fields that only OpenAI's chat has."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    prediction: Prediction | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # refused, unless they ask for nothing
    audio: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    prompt_cache_retention: None = None
    prompt_cache_options: None = None
    moderation: None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise errors.InvalidRequest(
                "top_logprobs: only allowed when logprobs is true", param="top_logprobs"
            )


_decoder = json_body.RequestDecoder(ChatRequest)


def decode(body: bytes) -> ChatRequest:
    """Return the request in this JSON body. Raises InvalidRequest, which names the field."""
    request = _decoder.decode(body)
    request.check()
    return request
