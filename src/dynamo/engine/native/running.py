"""An engine that has loaded, its loop, and who waits for what it brings.

When a request is aborted, outputs of it may be on their way; they are dropped here, where it is known who still waits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.base import errors
from dynamo.engine import api, refusal
from dynamo.engine.native import endings, scheduler
from dynamo.engine.native.assemble import Assembly
from dynamo.engine.native.guidance import grammars
from dynamo.engine.native.loop import EngineLoop
from dynamo.kvbm import exchange as exchanges
from dynamo.protocols import generate, kv_transfer

Post = Callable[..., None]  # call this function with these arguments on the event loop


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and which of its choices have not."""

    request: generate.Request
    choices: set[int]


class Running:
    """Used on the event loop only."""

    def __init__(
        self, assembly: Assembly, exchange: exchanges.KvExchange, sink: api.EngineSink, post: Post
    ) -> None:
        self.facts, self.region = assembly.facts, assembly.region
        self.post = post
        self.loop = EngineLoop(
            assembly.scheduler,
            assembly.runner,
            functools.partial(post, self._deliver),
            functools.partial(post, exchange.begin_imports),
        )
        self._exchange = exchange
        self._vocab_size = assembly.vocab_size
        self._grammars = assembly.grammars
        self._sink = sink
        self._open: dict[str, _Open] = {}  # by request id
        self._is_silent = False
        self._death: errors.DynamoError | None = None

    def submit(self, request: generate.Request) -> None:
        if self._death is not None:
            raise self._death
        refusal.check(request, self.facts, vocab_size=self._vocab_size)
        if request.id in self._open:
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        first = None
        if request.kv_transfer_params is not None:
            first = self._handed_over(request)
        self._open[request.id] = _Open(request, set(range(request.sampling_options.n)))
        if first is None:
            self._begin(request)
        else:
            self.post(self._go_on, request, first)

    def abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None):
            self._exchange.abort_import(request_id)
            self.loop.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        found = self._open.get(request_id)
        if found is None or index not in found.choices:
            return
        self.loop.abort_choice(request_id, index)
        self._close(found, index)
        if not found.choices:
            self._exchange.abort_import(request_id)

    def stop(self) -> None:
        self._is_silent = True
        self._grammars.stop()
        self.loop.stop()

    def died(self, death: errors.EngineFailed) -> None:
        self._death = death
        if not self._is_silent:
            self._sink.died(death)

    def _begin(self, request: generate.Request) -> None:
        if self._find(request) is None:
            return
        guided = request.sampling_options.guided_decoding
        if guided is None:
            self.loop.submit(request)
        else:
            made = functools.partial(self.post, self._made, request)
            self._grammars.make(guided, request.eos_token_ids, made)

    def _handed_over(self, request: generate.Request) -> kv_transfer.FirstToken | None:
        """It goes from one engine to another; gives the token that comes with it."""
        first = self._exchange.accept_request(request)
        if first is not None and first.token_id >= self._vocab_size:
            self._exchange.abort_import(request.id)
            raise errors.RemoteProtocolError(
                f"kv_transfer_params: expected a first token below {self._vocab_size}, got {first.token_id}"
            )
        return first

    def _go_on(self, request: generate.Request, first: kv_transfer.FirstToken) -> None:
        """With an answer that has its first token; that is on its way before the thread takes the processor."""
        if self._find(request) is None:  # it was aborted meanwhile
            return
        told = _first_output(request, first, self.facts.context_length)
        self._deliver(scheduler.StepResult(outputs=[scheduler.RequestOutput(request, told)]))
        if told.finish_reason is None:
            self.post(self._begin, request)
        else:
            self._exchange.skip_import(request.id)

    def _made(
        self, request: generate.Request, grammar: grammars.Grammar | errors.DynamoError
    ) -> None:
        """Its grammar is there, or why there is none."""
        if self._is_silent or self._death is not None or self._find(request) is None:
            return
        if isinstance(grammar, errors.DynamoError):
            del self._open[request.id]
            self._sink.failed(request.id, grammar)
        else:
            self.loop.submit(request, grammar)

    def _deliver(self, result: scheduler.StepResult) -> None:
        if self._is_silent:
            return
        if result.holds_blocks:
            result.outputs = [self._placed(*item) for item in result.outputs]
        batch = [
            api.EngineOutput(request.id, output)
            for request, output in result.outputs
            if self._is_awaited(request, output)
        ]
        if batch:
            self._sink.outputs(batch)
        for request, error in result.failed:
            if self._find(request):
                del self._open[request.id]
                self._sink.failed(request.id, error)
        if result.stored_and_removed:
            self._sink.kv_events(result.stored_and_removed)

    def _placed(
        self, request: generate.Request, output: generate.Output
    ) -> scheduler.RequestOutput:
        """If blocks are held with this output: told where they are, or freed if nobody waits for it."""
        if output.kv_transfer_params is not None:
            found = self._find(request)
            if found is not None and output.index in found.choices:
                output = self._exchange.publish_lease(request, output)
            else:
                self._exchange.cancel_lease(output)
        return scheduler.RequestOutput(request, output)

    def _is_awaited(self, request: generate.Request, output: generate.Output) -> bool:
        """Whether somebody waits for this output; the last one of a request closes it."""
        found = self._find(request)
        if found is None or output.index not in found.choices:
            return False
        if output.finish_reason is not None:
            self._close(found, output.index)
        return True

    def _close(self, found: _Open, index: int) -> None:
        found.choices.discard(index)
        if not found.choices:
            del self._open[found.request.id]

    def _find(self, request: generate.Request) -> "_Open | None":
        """None if it was aborted, even if its id is in use again."""
        found = self._open.get(request.id)
        return found if found is not None and found.request is request else None


def _first_output(
    request: generate.Request, first: kv_transfer.FirstToken, context_length: int
) -> generate.Output:
    """Of a token that another engine has drawn."""
    reason, stop_reason = endings.find(
        request,
        first.token_id,
        num_output=1,
        is_full=request.prompt_len + 1 >= context_length,
    )
    return generate.Output(
        token_ids=(first.token_id,),
        finish_reason=reason,
        logprobs=None if first.logprobs is None else (first.logprobs,),
        cached_tokens=first.cached_tokens,
        stop_reason=stop_reason,
    )
