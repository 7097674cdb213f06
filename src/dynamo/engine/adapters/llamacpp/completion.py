"""One completion by llama.cpp: the thread that waits for it, and the results that its callback gets, token by token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dynamo.base import errors
from dynamo.engine.adapters import translation as shared
from dynamo.engine.adapters.llamacpp import slots, translation
from dynamo.protocols import blocks, generate

_UNAVAILABLE = 503
Put = Callable[[translation.CompletionPart | Exception | None], object]
OnResult = Callable[[Mapping[str, Any]], bool]  # returns whether to cancel the rest


class Server(Protocol):
    """The part of xllamacpp's server that completes prompts."""

    def handle_completions(self, options: Mapping[str, Any], on_result: OnResult) -> None:
        """Complete a prompt, and call `on_result` with each token, until the end or until it returns True."""


class Completion:
    """One choice of a request. `put` may be called in any thread; the thread of `run` is the only one that computes."""

    def __init__(
        self,
        request: generate.Request,
        options: Mapping[str, Any],
        claim: slots.SlotClaim,
        put: Put,
    ) -> None:
        self.claim = claim
        self.put = put
        self.tokens: list[int] = []  # of the answer, as far as they have come
        self.is_aborted = False  # set on the event loop, read by the thread
        self._request = request
        self._options = options
        self._stops = frozenset(shared.stop_token_ids(request))
        self._num_cached = 0
        self._num_predicted = 0  # since the current call of llama.cpp began
        self._last: translation.CompletionPart | None = None
        self._end = generate.FinishReason.LENGTH
        self._failure: errors.DynamoError | None = None

    def run(
        self, server: Server, block_size: int, token_bytes: Callable[[], Sequence[bytes]]
    ) -> translation.CompletionPart:
        """Compute the answer to its end, or until it is aborted, and return its last part. Raises DynamoError.

        The last part is not sent: when it is, the slot should be free, for a next request with the same prefix.
        """
        self._block_size, self._token_bytes = block_size, token_bytes
        if self._request.stop_conditions.min_tokens:
            self._complete(server, translation.without_end(self._options, self._request))
        if self._last is None:
            num_left = self._options["n_predict"] - len(self.tokens)
            self._complete(server, {**self._options, "n_predict": num_left})
        if self._last is not None:
            return self._last
        # It ended by an end token that only llama.cpp knows, or within a character.
        no_logprobs = None if self._request.output_options.logprobs is None else ()
        return translation.CompletionPart((), self._num_cached, no_logprobs, self._end)

    def _complete(self, server: Server, options: Mapping[str, Any]) -> None:
        if self.is_aborted:
            return
        assert self.claim.slot is not None
        self._num_predicted = 0
        prompt = {
            "prompt": blocks.unpack(self.claim.prompt) + self.tokens,
            "id_slot": self.claim.slot.number,
            "cache_prompt": bool(self.claim.num_cached or self.tokens),
        }
        server.handle_completions({**options, **prompt}, self._receive)
        if self._failure is not None:
            raise self._failure

    def _receive(self, result: Mapping[str, Any]) -> bool:
        """Take one result of llama.cpp; return whether to cancel the rest."""
        if "error" in result:
            error = result["error"]
            kind = errors.Overloaded if error.get("code") == _UNAVAILABLE else errors.InvalidRequest
            self._failure = kind(f"llama.cpp: {error.get('message')}")
            return True
        if (progress := result.get("prompt_progress")) is not None:
            if not self.tokens:
                self._num_cached = progress["cache"] // self._block_size * self._block_size
            return self.is_aborted
        verbose = result["__verbose"]
        if verbose["stop"]:
            if verbose["stop_type"] == "eos":
                self._end = generate.FinishReason.EOS
        elif self._last is None and not self.is_aborted:
            self._add_tokens(result, verbose)
        return self._last is not None or self.is_aborted

    def _add_tokens(self, result: Mapping[str, Any], verbose: Mapping[str, Any]) -> None:
        """Send the token of a result, after those that llama.cpp withheld."""
        new: tuple[int, ...] = tuple(verbose["tokens"])
        num_missing = verbose["tokens_predicted"] - self._num_predicted - len(new)
        self._num_predicted = verbose["tokens_predicted"]
        num_recovered = 0
        if num_missing:
            text = result["choices"][0]["text"]
            recovered = translation.recover(text, new[0], num_missing, self._token_bytes()) or ()
            num_recovered, new = len(recovered), (*recovered, *new)
        self.tokens += new
        finish, stop_token = None, None
        if new[-1] in self._stops:
            finish, reason = shared.stop_finish(self._request, new[-1])
            stop_token = reason if isinstance(reason, int) else None
        elif len(self.tokens) >= self._options["n_predict"]:
            finish = generate.FinishReason.LENGTH
        num_top = self._request.output_options.logprobs
        logprobs = translation.part_logprobs(result, num_recovered, num_top)
        part = translation.CompletionPart(new, self._num_cached, logprobs, finish, stop_token)
        if finish is None:
            self.put(part)
        else:
            self._last = part
