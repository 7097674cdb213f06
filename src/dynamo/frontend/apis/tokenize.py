"""vLLM's `POST /tokenize`, `/detokenize`, `GET /tokenizer_info`: the tokens of texts, and the text of tokens.

Token counts equal those in the usage of an answer, because both come from the one preprocessor.
"""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects, openapi
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    READ_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.preprocess import conversation, inputs
from dynamo.protocols import blocks
from dynamo.runtime.http import exchange, json_body


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation. `model` may be left out where only one is served."""

    model: str | None = None
    prompt: str | None = None
    messages: conversation.Messages | None = None
    # default: true for a text, to which no template adds any
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # of a conversation
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    chat_template: inputs.TemplateText | None = None
    # without effect
    mm_processor_kwargs: inputs.Hint = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that exclude each other, and for messages of the wrong form."""
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            raise errors.InvalidRequest.of_param(
                "prompt", f"expected either prompt or messages, got {got}"
            )
        conversation.check_tools(self.tools or [])
        if self.messages is None:
            if self.chat_template is not None:
                raise errors.InvalidRequest.of_param(
                    "chat_template", "only allowed with messages; leave it out"
                )
            return
        self.to_conversation(self.model or "").check()
        if self.add_special_tokens:
            raise errors.InvalidRequest.of_param(
                "add_special_tokens",
                "a conversation gets them from the model's template; "
                "expected false or nothing, got true",
            )

    def to_conversation(self, model: str) -> inputs.Conversation:
        """Return the conversation that has this prompt."""
        return inputs.Conversation(
            model=model,
            messages=self.messages or [],
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
        )


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids. `model` may be left out where only one is served."""

    model: str | None = None
    tokens: list[inputs.UInt32]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs beside the tokens, to write prompts of conversations by itself; null: the model has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_decode_tokenize = json_body.RequestDecoder(TokenizeRequest).decode
_decode_detokenize = json_body.RequestDecoder(DetokenizeRequest).decode


async def tokenize(request: TokenizeRequest, model: RegisteredModel) -> TokenizeAnswer:
    """Return the tokens of a text or a conversation. Raises RequestError."""
    preparer = model.preparer
    if request.prompt is None:
        packed, _ = await preparer.tokenize_conversation(request.to_conversation(model.name))
    else:
        packed = await preparer.tokenize_text(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    token_ids: Sequence[int] = blocks.unpack(packed)
    token_strs = None
    if request.return_token_strs:  # a million of them take some tenths of a second
        token_strs = await asyncio.to_thread(preparer.list_vocabulary, token_ids)
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=preparer.context_length,
        tokens=list(token_ids),
        token_strs=token_strs,
    )


async def detokenize(request: DetokenizeRequest, model: RegisteredModel) -> DetokenizeAnswer:
    """Return the text of tokens. Raises RequestError."""
    return DetokenizeAnswer(prompt=model.preparer.detokenize_ids(request.tokens))


def show_tokenizer(model: RegisteredModel) -> TokenizerInfo:
    """Return the special tokens and the chat template of a model. Raises RequestError."""
    preparer = model.preparer
    tokens = {name: preparer.special_tokens.get(name) for name in _SPECIAL_TOKENS}
    return TokenizerInfo(**tokens, chat_template=preparer.template_source or None)


async def count_tokens(conversation: inputs.Conversation, model: RegisteredModel) -> int:
    """Return the length of a conversation's prompt in tokens. Raises RequestError."""
    token_ids, _ = await model.preparer.tokenize_conversation(conversation)
    return blocks.count(token_ids)


_TEXT_OR_CONVERSATION = {
    "anyOf": [
        openapi.make_object(
            ("prompt",), prompt=openapi.TEXT, messages=openapi.NULL, chat_template=openapi.NULL
        ),
        openapi.make_object(
            ("messages",),
            prompt=openapi.NULL,
            messages={"type": "array"},
            add_special_tokens={"enum": [False, None]},
        ),
    ]
}


def operations(handlers: RequestHandlers) -> Sequence[Operation]:
    api = Operations(tag="Tokens", errors=READ_ERRORS)
    api.post(
        "/tokenize",
        "From text, or a conversation, to token ids",
        request=TokenizeRequest,
        request_details={
            "messages": openapi.or_null(openapi.MESSAGES),
            "tools": openapi.or_null(openapi.TOOLS),
        },
        request_rules=(_TEXT_OR_CONVERSATION,),
        answer=TokenizeAnswer,
        example={"prompt": "Once upon a time"},
    )(handlers.compute_by_model(_decode_tokenize, tokenize))
    api.post(
        "/detokenize",
        "From token ids to text",
        request=DetokenizeRequest,
        answer=DetokenizeAnswer,
        example={"tokens": [1, 2, 3]},
    )(handlers.compute_by_model(_decode_detokenize, detokenize))

    @api.get(
        "/tokenizer_info",
        "The special tokens and the chat template of a model",
        wrap=add_request_id,
        answer=TokenizerInfo,
        errors=(400, *ACCESS_ERRORS, 404, 503),
    )
    async def show(client: exchange.Exchange) -> None:
        if not handlers.accept(client, error_dialects.OPENAI):
            return
        name = dict(parse_qsl(client.request.query)).get("model")
        try:
            info = show_tokenizer(await handlers.find_or_wait(client, name))
        except errors.DynamoError as error:
            delivery.respond_error(client, error, error_dialects.OPENAI)
        else:
            client.respond(200, sse.encode(info))

    return api.entries
