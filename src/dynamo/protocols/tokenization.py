"""`POST /tokenize` and `/detokenize`, in vLLM's shapes: what tokens a text is, and the reverse."""

from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_chat, openai_decode, openai_fields, openai_messages


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation. `model` may be left out where only one is served."""

    model: str | None = None
    prompt: str | None = None
    messages: openai_messages.Messages | None = None
    add_special_tokens: bool | None = None  # by default for a text, whose template adds none
    return_token_strs: bool | None = None
    # of a conversation
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # refused, unless they ask for nothing
    continue_final_message: None = None
    chat_template: None = None
    mm_processor_kwargs: None = None

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            raise errors.InvalidRequest(
                f"prompt: expected either prompt or messages, got {got}", param="prompt"
            )
        if self.messages is None:
            return
        openai_messages.check(self.messages)
        openai_messages.check_tools(self.tools or [])
        if self.add_special_tokens:
            raise errors.InvalidRequest(
                "add_special_tokens: a conversation gets them from the model's template; "
                "expected false or nothing, got true",
                param="add_special_tokens",
            )

    def chat(self, model: str) -> openai_chat.ChatRequest:
        """The chat request that has this prompt."""
        return openai_chat.ChatRequest(
            model=model,
            messages=self.messages or [],
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids. `model` may be left out where only one is served."""

    model: str | None = None
    tokens: list[openai_fields.UInt32]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to it."""

    prompt: str


_tokenize = openai_decode.RequestDecoder(TokenizeRequest)
decode_detokenize = openai_decode.RequestDecoder(DetokenizeRequest).decode


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """The request in this body. Raises InvalidRequest, which names the field."""
    request = _tokenize.decode(body)
    request.check()
    return request
