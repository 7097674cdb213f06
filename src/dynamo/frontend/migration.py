"""What is asked of another worker when the one that gave an answer is lost: the rest of it.

The tokens that have come become the end of the prompt, marked as answer (`Request.num_resumed`), so that seeds,
penalties, grammars and limits of thinking go on as if nothing had happened. What counts for the client is kept by the
delivery, which sees one answer all along: its text, its parsers, its usage.

Only the loss of a worker is a reason (`WorkerLost`): what one engine cannot do, another would not do either.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo.protocols import blocks, generate


class MigrationVerdict(enum.Enum):
    """What becomes of a request whose worker is lost."""

    MOVE = enum.auto()
    NOT_ALLOWED = enum.auto()  # migration is off
    EXHAUSTED = enum.auto()
    TOO_LONG = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPolicy:
    """How far a request is carried on."""

    limit: int = 3  # times; 0: never
    max_seq_len: int | None = None  # tokens, prompt and answer together
    wait_s: float = 5.0  # for a worker, if there is none

    def limit_of(self, of_card: int | None) -> int:
        """The card of a model may lower it."""
        return self.limit if of_card is None else min(self.limit, of_card)

    def verdict(self, *, num_moves: int, limit: int, seq_len: int) -> MigrationVerdict:
        """May a request of so many tokens be moved that has been moved so often?"""
        if not limit:
            return MigrationVerdict.NOT_ALLOWED
        if num_moves >= limit:
            return MigrationVerdict.EXHAUSTED
        if self.max_seq_len is not None and seq_len > self.max_seq_len:
            return MigrationVerdict.TOO_LONG
        return MigrationVerdict.MOVE


def remaining_requests(
    request: generate.Request, answered: Mapping[int, bytes]
) -> Mapping[int, generate.Request]:
    """What to ask for, by the first choice that is asked for; `answered` has the tokens of each choice that is open.

    A request of which nothing has come is asked for as it is. Else each choice goes its own way.
    """
    is_whole = len(answered) == request.sampling_options.n
    if is_whole and not any(answered.values()):
        return {0: request}
    return {choice: _rest_of(request, choice, tokens) for choice, tokens in answered.items()}


def has_no_tokens_left(request: generate.Request) -> bool:
    """Is nothing left to generate? Its worker was lost between the last token and the end."""
    return request.stop_conditions.max_tokens == 0


def _rest_of(request: generate.Request, choice: int, answered: bytes) -> generate.Request:
    num_tokens = blocks.count(answered)
    conditions, change = request.stop_conditions, msgspec.structs.replace
    limit = conditions.max_tokens
    return change(
        request,
        token_ids=request.token_ids + answered,
        num_resumed=num_tokens,
        first_choice=choice,
        stop_conditions=change(
            conditions,
            max_tokens=None if limit is None else max(0, limit - num_tokens),
            min_tokens=max(0, conditions.min_tokens - num_tokens),
        ),
        sampling_options=change(request.sampling_options, n=1),
        kv_transfer_params=None,  # blocks that were held for the worker that is lost
        # the worker that is lost has told them, if it told anything
        output_options=change(request.output_options, prompt_logprobs=None),
    )
