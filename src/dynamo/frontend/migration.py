"""Migration of a request: what another worker is asked for when the worker that answered is lost.

The tokens that have come become the end of the prompt, marked as output (`Request.num_resumed`), so that seeds,
penalties, grammars and limits of thinking continue as if nothing had happened. The state of the answer to the client
is kept by the delivery, which sees one answer all along: its text, its parsers, its usage.

Only the loss of a worker is a reason (`WorkerLost`), or that it is full before the first token (`Unavailable`): what an
engine cannot serve, another cannot serve either. A request that may have killed its worker (`router.retry_rules`) does
not migrate, because it would kill the next one too.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo.protocols import blocks, generate


class MigrationVerdict(enum.Enum):
    """The decision about a request that has lost its worker."""

    MIGRATE = enum.auto()
    NOT_ALLOWED = enum.auto()  # migration is off
    EXHAUSTED = enum.auto()
    TOO_LONG = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPolicy:
    """The limits of migration."""

    limit: int = 3  # migrations of one request; 0: none
    max_seq_len: int | None = None  # tokens of prompt and output together; None: no limit

    def limit_of(self, card_limit: int | None) -> int:
        """Return the limit for a model; its card may lower it."""
        return self.limit if card_limit is None else min(self.limit, card_limit)

    def judge(self, *, num_migrations: int, limit: int, seq_len: int) -> MigrationVerdict:
        """Return whether a request of `seq_len` tokens may migrate that has migrated `num_migrations` times."""
        if not limit:
            return MigrationVerdict.NOT_ALLOWED
        if num_migrations >= limit:
            return MigrationVerdict.EXHAUSTED
        if self.max_seq_len is not None and seq_len > self.max_seq_len:
            return MigrationVerdict.TOO_LONG
        return MigrationVerdict.MIGRATE


def remaining_requests(
    request: generate.Request, answered: Mapping[int, bytes]
) -> Mapping[int, generate.Request]:
    """Return the requests for the rest of an answer, by their first choice.

    `answered` has the packed tokens of each choice that is open. A request without any tokens is sent again as it is;
    otherwise each choice becomes a request of its own.
    """
    is_unchanged = len(answered) == request.sampling_options.n
    if is_unchanged and not any(answered.values()):
        return {0: request}
    return {
        choice: _remaining_choice(request, choice, tokens) for choice, tokens in answered.items()
    }


def has_no_tokens_left(request: generate.Request) -> bool:
    """Return whether nothing is left to generate, because the worker was lost after the last token."""
    return request.stop_conditions.max_tokens == 0


def _remaining_choice(request: generate.Request, choice: int, answered: bytes) -> generate.Request:
    num_tokens = blocks.count(answered)
    conditions, replace = request.stop_conditions, msgspec.structs.replace
    limit = conditions.max_tokens
    return replace(
        request,
        token_ids=request.token_ids + answered,
        num_resumed=num_tokens,
        first_choice=choice,
        stop_conditions=replace(
            conditions,
            max_tokens=None if limit is None else max(0, limit - num_tokens),
            min_tokens=max(0, conditions.min_tokens - num_tokens),
        ),
        sampling_options=replace(request.sampling_options, n=1),
        kv_transfer_params=None,  # they were exported for the lost worker
        # the lost worker has sent them, if it sent anything
        output_options=replace(request.output_options, prompt_logprobs=None),
    )
