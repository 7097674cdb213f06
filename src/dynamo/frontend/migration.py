"""Migration of a request: what another worker is asked for when the worker that answered is lost.

The tokens that have come become the end of the prompt, marked as output (`Request.num_resumed`), so that seeds,
penalties, grammars and limits of thinking continue as if nothing had happened. The state of the answer to the client
is kept by the delivery, which sees one answer all along: its text, its parsers, its usage.

Only the loss of a worker is a reason (`WorkerLost`), or that it is full before the first token (`Unavailable`): what an
engine cannot serve, another cannot serve either. A request that may have killed its worker (`router.retry_rules`) does
not migrate, because it would kill the next one too. `MigrationPolicy.judge` decides this for generated text and for
the shares of a request for embeddings.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo.base import errors
from dynamo.protocols import blocks, generate
from dynamo.router import retry_rules


class MigrationVerdict(enum.Enum):
    """The decision about a request after the early end of its answer."""

    MIGRATE = enum.auto()
    NOT_LOST = enum.auto()  # another worker could not serve it either
    SUSPECT = enum.auto()
    NOT_ALLOWED = enum.auto()  # migration is off
    EXHAUSTED = enum.auto()
    TOO_LONG = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The early end of a worker's answer, and the history of its request.

    `num_deaths` counts the workers that died while they had it; `is_prepared` is false if the last one may have died of
    preparing it (`retry_rules.is_suspect`). `has_others` says whether a worker serves the model that has not had it.
    """

    error: errors.DynamoError
    num_migrations: int
    num_deaths: int
    is_prepared: bool
    has_others: bool
    seq_len: int = 0  # tokens of prompt and output together


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPolicy:
    """The limits of migration."""

    limit: int = 3  # migrations of one request; 0: none
    max_seq_len: int | None = None  # tokens of prompt and output together; None: no limit

    def limit_of(self, card_limit: int | None) -> int:
        """Return the limit for a model; its card may lower it."""
        return self.limit if card_limit is None else min(self.limit, card_limit)

    def judge(self, loss: Loss, card_limit: int | None) -> MigrationVerdict:
        """Return whether a request may migrate to another worker of a model with this limit in its card."""
        # neither a request that has migrated nor a new one need fail because one worker is full
        is_full = isinstance(loss.error, errors.Unavailable) and (
            loss.num_migrations > 0 or loss.has_others
        )
        if not is_full and not isinstance(loss.error, errors.WorkerLost):
            return MigrationVerdict.NOT_LOST
        if retry_rules.is_suspect(loss.num_deaths, is_prepared=loss.is_prepared):
            return MigrationVerdict.SUSPECT
        if not (limit := self.limit_of(card_limit)):
            return MigrationVerdict.NOT_ALLOWED
        if loss.num_migrations >= limit:
            return MigrationVerdict.EXHAUSTED
        if self.max_seq_len is not None and loss.seq_len > self.max_seq_len:
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
