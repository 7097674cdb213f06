"""What tokens a request would be, without asking a worker: count, tokenize, detokenize.

The counts are those of the answer's usage, because both come from the one preprocessor.
"""

from collections.abc import Sequence

import msgspec

from dynamo.base import errors
from dynamo.frontend import responses
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import anthropic, anthropic_blocks, blocks, openai_chat, tokenization


class MessageTokens(msgspec.Struct, frozen=True):
    """As Anthropic's API tells it."""

    input_tokens: int


class ResponseTokens(msgspec.Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    """As OpenAI's API tells it."""

    input_tokens: int


class TokenCounts:
    """Each method takes the body of a request and gives that of its answer. They raise DynamoError."""

    def __init__(self, known: registry.ModelRegistry, remembered: responses.Responses) -> None:
        self._models = known
        self._responses = remembered

    async def of_message(self, body: bytes) -> MessageTokens:
        """`POST /v1/messages/count_tokens`."""
        chat = anthropic_blocks.chat(anthropic.decode_count(body))
        return MessageTokens(await self._of_chat(chat))

    async def of_response(self, body: bytes) -> ResponseTokens:
        """`POST /v1/responses/input_tokens`."""
        return ResponseTokens(await self._of_chat(self._responses.read_prompt(body)))

    async def tokenize(self, body: bytes) -> tokenization.Tokenized:
        """`POST /tokenize`."""
        request = tokenization.decode_tokenize(body)
        model = self._find(request.model)
        preparer = model.preparer
        if request.prompt is None:
            packed, _ = await preparer.read_chat(request.chat(model.name))
        else:
            packed = await preparer.read_text(
                request.prompt, add_special_tokens=request.add_special_tokens is not False
            )
        token_ids: Sequence[int] = blocks.unpack(packed)
        return tokenization.Tokenized(
            count=len(token_ids),
            max_model_len=preparer.context_length,
            tokens=list(token_ids),
            token_strs=preparer.vocabulary(token_ids) if request.return_token_strs else None,
        )

    async def detokenize(self, body: bytes) -> tokenization.Detokenized:
        """`POST /detokenize`."""
        request = tokenization.decode_detokenize(body)
        preparer = self._find(request.model).preparer
        return tokenization.Detokenized(prompt=preparer.write_text(request.tokens))

    async def _of_chat(self, request: openai_chat.ChatRequest) -> int:
        """The length of its prompt."""
        preparer = self._models.find(request.model).preparer
        token_ids, _ = await preparer.read_chat(request)
        return blocks.count(token_ids)

    def _find(self, name: str | None) -> RegisteredModel:
        """The one of this name, or the only one."""
        if name is not None:
            return self._models.find(name)
        ready = self._models.ready_bases
        if len(ready) == 1:
            return ready[0]
        served = ", ".join(repr(model.name) for model in ready)
        raise errors.InvalidRequest(
            f"model: required where not exactly one is served. Served here: {served or 'none'}.",
            param="model",
        )
