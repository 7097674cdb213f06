"""`POST /v1/embeddings`: the request, as it came."""

from typing import Annotated, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_decode, openai_fields

MAX_INPUTS = 2048  # as OpenAI's API has it, and so the next one
MAX_TOKENS = 300_000  # of all inputs together
MAX_CHARS = 16 * MAX_TOKENS  # likewise, so that what is far too much is not tokenized first
Input = str | list[int]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts whose vectors are wanted."""

    model: str
    input: str | list[str | openai_fields.UInt32 | list[openai_fields.UInt32]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    # refused, unless it asks for nothing
    nvext: None = None

    @property
    def inputs(self) -> list[Input]:
        """One or more, each a text or token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]  # `check` saw to it that all are ids
        return self.input  # type: ignore[return-value]  # likewise

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if not isinstance(self.input, str):
            _check_kinds(self.input)
        if len(self.inputs) > MAX_INPUTS:
            raise _wrong(f"at most {MAX_INPUTS} inputs", str(len(self.inputs)))
        for number, one in enumerate(self.inputs):
            if not one:
                raise _wrong("at least one character or token in each", f"none in number {number}")
        num_chars = sum(len(one) for one in self.inputs if isinstance(one, str))
        if num_chars > MAX_CHARS:
            raise _wrong(f"at most {MAX_CHARS} characters in all inputs together", str(num_chars))


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """What it cost."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def _check_kinds(found: list[str | int | list[int]]) -> None:
    if len(set(map(type, found))) != 1:
        raise _wrong(
            "a string, or a list of strings, of token ids, or of lists of token ids",
            "a mixed list" if found else "an empty list",
        )


def _wrong(expected: str, got: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"input: expected {expected}, got {got}", param="input")


_decoder = openai_decode.RequestDecoder(EmbeddingRequest)


def decode(body: bytes) -> EmbeddingRequest:
    """The request in this body. Raises InvalidRequest, which names the field."""
    request = _decoder.decode(body)
    request.check()
    return request
