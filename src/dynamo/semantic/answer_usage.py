"""The tokens that a model's answer reports, in the fields of each API.

OpenAI's chat and plain completions, its Responses, Anthropic's messages and Ollama's answers; of a stream each event,
or line, may report a part.
"""  # decider

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

_OLLAMA = ("prompt_eval_count", "eval_count")
_PROMPT_PARTS = (  # Anthropic's first one leaves out what the others count
    *("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
)
MARKS = (b'"usage"', b'"eval_count"')  # one is in each event that reports tokens


class _Reported(msgspec.Struct, frozen=True):
    """The fields of a whole answer that report tokens; its text and log probabilities may be many megabytes."""

    usage: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None


_decode_reported = msgspec.json.Decoder(_Reported).decode


class AnswerUsage(NamedTuple):
    """The tokens of an answer and of its prompt."""

    num_prompt: int
    num_written: int


def read_fields(answer: Any) -> dict[str, Any]:
    """Return the fields in which an answer, or an event of it, reports tokens; none if it reports nothing."""
    fields: dict[str, Any] = {}
    for holder in _holders(answer):
        if isinstance(usage := holder.get("usage"), dict):
            fields |= usage
        fields |= {name: holder[name] for name in _OLLAMA if name in holder}
    return fields


def read_body(body: bytes) -> dict[str, Any]:
    """Return the same of a whole answer as JSON, of which nothing else is decoded. Raises DecodeError."""
    return read_fields(msgspec.structs.asdict(_decode_reported(body)))


def _holders(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield an answer, and what an event of Responses or of Anthropic's messages has of one."""
    if isinstance(answer, dict):
        inner = (answer.get("response"), answer.get("message"))
        yield from (each for each in (answer, *inner) if isinstance(each, dict))


def count(fields: Mapping[str, Any]) -> AnswerUsage | None:
    """Return the tokens by such fields; None unless they tell both numbers."""
    numbers = {name: each for name, each in fields.items() if type(each) is int and each >= 0}
    cached = sum(numbers.get(name, 0) for name in _PROMPT_PARTS)
    for prompt, written in (
        ("prompt_tokens", "completion_tokens"),
        ("input_tokens", "output_tokens"),
        _OLLAMA,
    ):
        if prompt in numbers and written in numbers:
            num_prompt = cached if prompt == "input_tokens" else numbers[prompt]
            return AnswerUsage(num_prompt, numbers[written])
    return None
