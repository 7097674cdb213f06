"""llama.cpp behind the engine seam (`streams.Library`), by the wheel `xllamacpp`: its server, with callbacks.

The server runs in threads of this process. A completion blocks the thread that asks for it, so there is a thread for
each slot; which request runs in which slot is decided here (`slots`), and further requests wait here. A callback comes
for each token, and its answer cancels: so an abort takes effect with the next token, or within the prompt with the next
batch of it.

A slot has a whole context of its own, so that a request that runs out of it ends alone, at its length; nothing is cut
from the front of a prompt. llama.cpp opens a port on loopback as well, which has no use here: a random key locks it.

The only module that imports `xllamacpp`. Written for 2026.10.
"""

import asyncio
import concurrent.futures
import ctypes
import functools
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import xllamacpp

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import streams
from dynamo.engine.adapters import translation as shared
from dynamo.engine.adapters.llamacpp import grammars, slots, translation
from dynamo.engine.adapters.settings import LlamacppConfig
from dynamo.protocols import blocks, generate, kv_events, load

_ERROR_BY_CODE = {500: errors.EngineFailed, 503: errors.Overloaded}  # others: the request's fault
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
        self, server: Server, block_size: int, token_bytes: Callable[[], translation.TokenBytes]
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
            kind = _ERROR_BY_CODE.get(error.get("code"), errors.InvalidRequest)
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


_SPARE_TOKENS = 256  # so that a request ends at our context length, before llama.cpp's
_MIN_CONTEXT = 256
_GIB = 2**30
_logger = logging.getLogger(__name__)


def build(directory: Path, settings: LlamacppConfig) -> api.Engine:
    """Return the engine for the GGUF file in `directory`, not yet started. Raises ConfigError."""
    return streams.StreamingEngine(LlamaLibrary(directory, settings))


def choose_context_length(config: Mapping[str, Any], settings: LlamacppConfig) -> int:
    """Return the context length in tokens: as set, or the model's, or what the memory for KV holds. Raises ConfigError.

    `config` is the model's config.json.
    """
    trained: int = config["max_position_embeddings"]
    if settings.max_model_len is not None:
        if settings.max_model_len > trained:
            raise errors.ConfigError(
                f"--max-model-len: expected at most {trained}, for which the model was trained,"
                f" got {settings.max_model_len}"
            )
        return settings.max_model_len
    num_bytes = settings.kv_cache_memory_gb * _GIB
    room = int(num_bytes / max(1, config["kv_bytes_per_token"]) / settings.max_num_seqs)
    if room < trained:
        length = max(_MIN_CONTEXT, room - room % _MIN_CONTEXT)
        _logger.info(
            "the context is %d tokens of the model's %d: so much fits into %g GiB for each of %d requests at once"
            " (--kv-cache-memory-gb, --max-num-seqs, --max-model-len)",
            length, trained, settings.kv_cache_memory_gb, settings.max_num_seqs,
        )  # fmt: skip
        return length
    return trained


class LlamaLibrary:
    """llama.cpp's server as a `streams.Library`."""

    name = "llama.cpp"

    def __init__(self, directory: Path, settings: LlamacppConfig) -> None:
        """Raises ConfigError unless `directory` has one GGUF file, and its config.json."""
        paths = sorted(directory.glob("*.gguf"))
        if len(paths) != 1:
            raise errors.ConfigError(
                f"{directory}: expected one GGUF file, got {len(paths)}; name the file itself"
            )
        # not by the link: llama.cpp finds the parts of a split model by the name of the first
        self._path = directory / paths[0].readlink() if paths[0].is_symlink() else paths[0]
        self._directory, self._settings = directory, settings
        self._config = json.loads((directory / "config.json").read_text("utf-8"))
        self._context_length = choose_context_length(self._config, settings)
        self._slots = slots.SlotTable(settings.max_num_seqs, settings.block_size)
        self._completions: dict[slots.SlotClaim, Completion] = {}
        self._names: dict[str, Completion] = {}  # by name, while their streams are read
        self._threads = concurrent.futures.ThreadPoolExecutor(
            settings.max_num_seqs, thread_name_prefix="llama.cpp"
        )
        self._server: Any = None
        self._grammars = grammars.make_trials()
        self._num_prompt_tokens = self._num_cached_tokens = 0

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        self._on_kv_events = on_kv_events
        self._loop = asyncio.get_running_loop()
        settings, context_length = self._settings, self._context_length
        params = xllamacpp.CommonParams()
        params.model.path = str(self._path)
        params.n_parallel = settings.max_num_seqs
        params.n_ctx = (context_length + _SPARE_TOKENS) * settings.max_num_seqs
        params.kv_unified = params.ctx_shift = False
        params.n_ubatch = min(512, settings.max_num_batched_tokens)
        params.n_batch = settings.max_num_batched_tokens
        params.n_gpu_layers = settings.gpu_layers
        cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
        num_threads = settings.threads or len(cores)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        params.cache_ram_mib, params.cache_idle_slots = 0, False  # what slots keep, we decide
        params.fit_params = params.enable_chat_template = params.ui = False
        params.verbosity = 1  # errors
        params.api_keys = [secrets.token_hex(16)]
        try:
            self._server = await asyncio.to_thread(xllamacpp.Server, params)
        except (RuntimeError, ValueError) as error:
            raise errors.EngineFailed(
                f"llama.cpp cannot load {self._path}: {error} (its own words are above)"
            ) from error
        # Never destroyed: its destructor may wait for ever for a thread of its own. The memory ends with the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))
        num_blocks = -(-context_length // settings.block_size)
        return api.EngineFacts(
            context_length=context_length,
            kv_block_size=settings.block_size,
            total_kv_blocks=num_blocks * settings.max_num_seqs,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            supports_prompt_logprobs=False,
            supports_thinking_limit=False,
            supports_guided=sys.platform == "linux",  # where a trial can be ended
        )

    @property
    def vocab_size(self) -> int:
        size: int = self._config["vocab_size"]
        return size

    def plan(self, request: generate.Request, index: int) -> dict[str, Any]:
        return translation.completion_options(request, index, self._context_length)

    async def stream(
        self, request: generate.Request, plan: dict[str, Any], name: str
    ) -> AsyncIterator[translation.CompletionPart]:
        parts: asyncio.Queue[translation.CompletionPart | Exception | None] = asyncio.Queue()

        def put(part: translation.CompletionPart | Exception | None) -> None:
            self._loop.call_soon_threadsafe(parts.put_nowait, part)

        claim = slots.SlotClaim(request.token_ids, request.hash_seed)
        self._completions[claim] = running = Completion(request, plan, claim, put)
        self._names[name] = running
        try:
            if request.sampling_options.guided_decoding is not None:
                await self._check_grammar(running, request.sampling_options.guided_decoding)
            if running.is_aborted:
                return
            self._slots.enqueue(claim, request.priority)
            self._start_granted()
            while (part := await parts.get()) is not None:
                if isinstance(part, Exception):
                    raise part
                if claim.slot is not None:
                    claim.slot.num_tokens += len(part.tokens)
                yield part
        finally:
            del self._names[name]

    async def _check_grammar(self, running: Completion, guided: generate.GuidedDecoding) -> None:
        """Try the grammar, while other streams go on. Raises DynamoError, also for what was aborted meanwhile."""
        try:
            await self._grammars.check(guided)
        except errors.DynamoError:
            self._completions.pop(running.claim, None)
            raise

    def translate(
        self,
        result: translation.CompletionPart,
        index: int,
        request: generate.Request,
        *,
        is_first: bool,
    ) -> generate.Output:
        if is_first:
            self._num_prompt_tokens += request.prompt_len
            self._num_cached_tokens += result.num_cached
        return translation.translate_output(result, index, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError | None:
        return None  # what ends one request is a DynamoError; any other error ends the engine

    def death(self) -> BaseException | None:
        return None  # it lives and dies with this process

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            running = self._names.get(name)
            if running is None:
                continue
            running.is_aborted = True
            if running.claim.slot is None:
                self._slots.withdraw(running.claim)
                del self._completions[running.claim]
            running.put(None)

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        state = shared.RankLoad(
            num_running=self._slots.num_running,
            num_waiting=self._slots.num_waiting,
            num_blocks=self._slots.num_active_blocks,
            hit_rate=self._num_cached_tokens / max(1, self._num_prompt_tokens),
        )
        return [state.metrics(facts, 0, num_prefill_tokens=num_prefill_tokens, is_idle=is_idle)]

    async def clear(self) -> None:
        self._slots.clear()

    async def stop(self) -> None:
        """End llama.cpp's threads; each ends with the token, or the batch of a prompt, that it computes."""
        for running in self._completions.values():
            running.is_aborted = True
            self._slots.withdraw(running.claim)  # or it would be started with the next slot
        await self._grammars.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._server = None

    def _start_granted(self) -> None:
        """Give idle slots to the requests that wait, and start these."""
        while True:
            claim, events = self._slots.grant()
            self._publish(events)
            if claim is None:
                return
            self._threads.submit(self._run, self._completions[claim])

    def _run(self, running: Completion) -> None:
        """Compute a completion, in a thread."""
        last: translation.CompletionPart | Exception
        try:
            last = running.run(self._server, self._settings.block_size, lambda: self._token_bytes)
        except Exception as error:  # noqa: BLE001 - the stream raises it, and so ends a request or the engine
            last = error
        self._loop.call_soon_threadsafe(self._end, running, last)

    def _end(self, running: Completion, last: translation.CompletionPart | Exception) -> None:
        """Take the slot back, send the end of the answer, and start the next request."""
        is_known = not isinstance(last, Exception) and not running.is_aborted
        self._publish(self._slots.release(running.claim, running.tokens if is_known else None))
        del self._completions[running.claim]
        running.put(last)
        running.put(None)
        self._start_granted()

    def _publish(self, events: Sequence[kv_events.KvEvent]) -> None:
        if events:
            self._on_kv_events(events, 0)

    @functools.cached_property
    def _token_bytes(self) -> translation.TokenBytes:
        content = (self._directory / "tokenizer.json").read_text("utf-8")
        return translation.token_bytes(json.loads(content))
