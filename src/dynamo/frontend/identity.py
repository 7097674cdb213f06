"""What an answer says of itself: its id, when it was made, by which model and which version of it."""

from typing import Any, Protocol

import msgspec
import xxhash

from dynamo.base import distribution
from dynamo.preprocess import detokenize
from dynamo.protocols import model_card

_VERSION = distribution.version()
_encode = msgspec.json.Encoder(order="sorted").encode


class TokenNames(Protocol):
    """What tokens are called in log probabilities."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that it stands for."""
        ...

    def token_text(self, token_id: int) -> str:
        """The same as text."""
        ...


class NumberedTokens:
    """Names by id, as vLLM has them: texts are not unique, and a part of a character is no text at all."""

    def token_bytes(self, token_id: int) -> bytes:
        """`token_id:7`"""
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """`token_id:7`"""
        return f"token_id:{token_id}"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one answer."""

    request_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    text: detokenize.TextDecoder  # the model's tokens

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """What OpenAI's objects of this kind begin with."""
        return {
            "id": prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def names(self, *, by_number: bool | None) -> TokenNames:
        """What tokens are called in this answer."""
        return NumberedTokens() if by_number else self.text


def fingerprint(card: model_card.ModelCard, *adapter: str) -> str:
    """The same for the same model files, engine settings and release: with a seed, answers are then the same."""
    facts = (
        _VERSION,
        card.checksums,
        card.context_length,
        card.kv_cache_block_size,
        card.runtime_config,
        *adapter,
    )
    return f"fp_{xxhash.xxh3_64_hexdigest(_encode(facts))[:10]}"
