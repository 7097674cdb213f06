"""The identity of an answer: its id, creation time, model and fingerprint, and the names of tokens in it."""

from typing import Any, Protocol

import msgspec
import xxhash

from dynamo.base import clock as clocks
from dynamo.base import distribution
from dynamo.preprocess import detokenize
from dynamo.protocols import generate, model_card

_VERSION = distribution.version()
_encode = msgspec.json.Encoder(order="sorted").encode


class TokenNames(Protocol):
    """Names of tokens in log probabilities."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a token."""
        ...


class IdTokenNames:
    """Names tokens by id, `token_id:7`, as vLLM does: texts are not unique, and part of a character has none."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the name as bytes."""
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """Return the name."""
        return f"token_id:{token_id}"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one answer."""

    request_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    text: detokenize.TextDecoder  # the model's tokens
    sampling: generate.SamplingOptions  # with the defaults of the model
    context_length: int
    clock: clocks.Clock

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the fields that OpenAI's objects of this kind begin with."""
        return {
            "id": prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def token_names(self, *, by_id: bool | None) -> TokenNames:
        """Return the names of tokens in this answer."""
        return IdTokenNames() if by_id else self.text


def fingerprint(card: model_card.ModelCard, *adapter: str) -> str:
    """Return an id of model files, engine settings and release: with equal ids and seeds, answers are equal."""
    facts = (
        _VERSION,
        card.checksums,
        card.context_length,
        card.kv_cache_block_size,
        card.runtime_config,
        *adapter,
    )
    return f"fp_{xxhash.xxh3_64_hexdigest(_encode(facts))[:10]}"
