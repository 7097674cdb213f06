"""The answers of the mock engine: a cycle of tokens, repeated from a position that a hash of the prompt selects.

So the whole answer to a request, its length and its finish reason, is known when the request arrives, and the outputs
of a step are prepared: one for each token. With `--echo` the cycle is the request's own prompt.
"""  # decider

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from dynamo.protocols import blocks, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class MockAnswer:
    """The answer of one choice: `length` tokens of the cycle from `start` on."""

    start: int
    length: int
    finish_reason: generate.FinishReason
    stop_reason: int | None = None


class TokenCycle:
    """The tokens of which answers are made, in their order."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self._token_set = frozenset(token_ids)
        self._packed = blocks.pack(token_ids)
        self.outputs = functools.lru_cache(maxsize=64)(self._prepare)

    def __len__(self) -> int:
        return len(self.token_ids)

    def packed(self, start: int, count: int) -> bytes:
        """Return `count` packed tokens from position `start` on."""
        start %= len(self)
        repeated = self._packed * ((start + count) // len(self) + 1)
        return repeated[start * blocks.TOKEN_BYTES : (start + count) * blocks.TOKEN_BYTES]

    def answer(self, request: generate.Request, index: int, context_length: int) -> MockAnswer:
        """Return the answer of choice `index` of the request."""
        conditions = request.stop_conditions
        num_prompt_bytes = len(request.token_ids) - request.num_resumed * blocks.TOKEN_BYTES
        seed = 0 if request.lora_name is None else blocks.seed_of(request.lora_name)
        digest = xxhash.xxh3_64_intdigest(request.token_ids[:num_prompt_bytes], seed)
        start = (digest + request.first_choice + index + request.num_resumed) % len(self)
        room = context_length - request.prompt_len
        length = min(room, conditions.max_tokens or room)
        eos = () if conditions.ignore_eos else request.eos_token_ids
        stops = self._token_set.intersection((*eos, *conditions.stop_token_ids))
        position = None  # of the token that ends the answer, counted from 1
        if stops:
            first = max(1, conditions.min_tokens)
            positions = range(first, min(length, first + len(self) - 1) + 1)
            tokens, size = self.token_ids, len(self)
            position = next((p for p in positions if tokens[(start + p - 1) % size] in stops), None)
        if position is None:
            return MockAnswer(
                start=start, length=length, finish_reason=generate.FinishReason.LENGTH
            )
        token = self.token_ids[(start + position - 1) % len(self)]
        is_eos = token in eos
        return MockAnswer(
            start=start,
            length=position,
            finish_reason=generate.FinishReason.EOS if is_eos else generate.FinishReason.STOP,
            stop_reason=None if is_eos else token,
        )

    def prompt_logprobs(
        self, request: generate.Request
    ) -> tuple[generate.TokenLogprobs, ...] | None:
        """Return log probabilities of each prompt token but the first, if the request asks for them; all are equal."""
        num = request.output_options.prompt_logprobs
        if num is None:
            return None
        return (self._logprobs(num),) * (request.prompt_len - 1)

    def _prepare(self, index: int, num_logprobs: int | None) -> tuple[generate.Output, ...]:
        """Make the output for each token. All tokens are equally likely, and their log probabilities say so."""
        logprobs = None if num_logprobs is None else (self._logprobs(num_logprobs),)
        return tuple(
            generate.Output(token_ids=(token,), index=index, logprobs=logprobs)
            for token in self.token_ids
        )

    def _logprobs(self, num: int) -> generate.TokenLogprobs:
        logprob = -math.log(len(self))
        top = tuple(generate.TopLogprob(token_id, logprob) for token_id in self.token_ids[:num])
        return generate.TokenLogprobs(logprob, top)


class EchoedPrompt(TokenCycle):
    """The tokens of a request's own prompt, of which its answer consists, and one that ends it."""

    def __init__(self, request: generate.Request) -> None:
        num_tokens = request.prompt_len - request.num_resumed
        prompt = blocks.unpack(request.token_ids[: num_tokens * blocks.TOKEN_BYTES])
        super().__init__([*prompt, *request.eos_token_ids[:1]])

    def answer(self, request: generate.Request, index: int, context_length: int) -> MockAnswer:
        """Return the prompt, or the part of it that the limits allow."""
        num_left = max(1, len(self) - request.num_resumed)
        room = context_length - request.prompt_len
        length = min(num_left, room, request.stop_conditions.max_tokens or room)
        is_ended = length == num_left and bool(request.eos_token_ids)
        reason = generate.FinishReason.EOS if is_ended else generate.FinishReason.LENGTH
        return MockAnswer(start=request.num_resumed, length=length, finish_reason=reason)
