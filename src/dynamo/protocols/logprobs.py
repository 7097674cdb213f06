"""Log probabilities of tokens, as engines report them and as they travel with a prompt's KV blocks."""

import msgspec


class TopLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that could have been chosen, and its natural-log probability."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chosen token's log probability, and the likeliest tokens, best first (the chosen one may be among them)."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()
