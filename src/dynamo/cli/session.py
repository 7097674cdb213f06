"""A session with one model, as `dynamo run` has it without HTTP: for conversations, batches, or one prompt.

The main thread talks to the person; the worker, its heartbeats and the streams run on an event loop in a thread of
their own. Line editing, Ctrl-C and Ctrl-D then work as in every terminal program.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, ids
from dynamo.cli import workers
from dynamo.frontend.apis import chat as openai_chat
from dynamo.frontend.delivery import choices
from dynamo.frontend.model_registry import file_fetcher
from dynamo.preprocess import loading, preprocessor, tokenize, tokenizer_library
from dynamo.preprocess.parsers import parser
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import client, component

FIND_S = 5.0  # for discovery to show the instances of an endpoint
Message = Mapping[str, Any]


class Answer(NamedTuple):
    """A complete answer to a conversation."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    duration_s: float
    thoughts: str = ""

    @property
    def message(self) -> Message:
        thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
        return {"role": "assistant", "content": self.text, **thoughts}


class Session:
    """A session with the model of one endpoint."""

    def __init__(
        self,
        endpoint: client.EndpointClient,
        processor: preprocessor.Preprocessor,
        model: str,
        clock: clocks.Clock,
        find_workers: Callable[[], Awaitable[Collection[int]]],
    ) -> None:
        self._endpoint = endpoint
        self._processor = processor
        self._clock = clock
        self._find_workers = find_workers
        self.model = model

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for options that no request may have."""
        question = {"role": "user", "content": "-"}
        body = {"model": self.model, "messages": [question], **options}
        openai_chat.decode(msgspec.json.encode(body))

    async def chat(
        self,
        messages: Sequence[Message],
        on_text: Callable[[str], None] = lambda text: None,
        on_thought: Callable[[str], None] = lambda text: None,
        /,
        **fields: Any,
    ) -> Answer:
        """Answer a conversation; further fields are those of OpenAI's request.

        `on_text` gets each piece of text as it comes, and `on_thought` each piece of what the model thinks. A call of
        a tool is text. A cancelled call aborts the request in the worker.
        """
        began_at = self._clock.now()
        body = msgspec.json.encode({"model": self.model, "messages": messages, **fields})
        # without a stream calls come whole
        chat_request = msgspec.structs.replace(openai_chat.decode(body), stream=None)
        prepared = await self._processor.prepare_conversation(chat_request, ids.new_request_id())
        request = prepared.request
        if request.sampling_options.n != 1:
            raise errors.InvalidRequest.of_param("n", "expected 1, because one answer is shown")
        choice, finish_reason = self._make_choice(chat_request, prepared), ""
        pieces: list[str] = []
        thoughts: list[str] = []
        workers = await self._find_workers()
        outputs = self._endpoint.stream(request, item_type=generate.Output, among=workers)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                text, _ = choice.read(output)
                for piece in choice.take_pieces(text):
                    if isinstance(piece, parser.Reasoning):
                        thoughts.append(piece.text)
                        on_thought(piece.text)
                    else:
                        pieces.append(piece if isinstance(piece, str) else _describe_call(piece))
                        on_text(pieces[-1])
                if choice.is_over:
                    is_length = choice.finish_reason is generate.FinishReason.LENGTH
                    finish_reason = "length" if is_length else "stop"
                    break
        return Answer(
            text="".join(pieces),
            finish_reason=finish_reason,
            prompt_tokens=request.prompt_len,
            completion_tokens=choice.text.num_tokens,
            duration_s=self._clock.now() - began_at,
            thoughts="".join(thoughts),
        )

    def _make_choice(
        self, chat_request: openai_chat.ChatRequest, prepared: preprocessor.Prepared
    ) -> choices.Choice:
        """Return what reads the answer: its text, and its thoughts and calls where the model's format is known."""
        parsers = prepared.parsers
        text = self._processor.make_answer_text(
            prepared.request, chat_request, shows_marks=parsers is not None
        )
        if parsers is None:
            return choices.Choice(0, text, has_logprobs=False)
        return choices.ParsedChoice(
            0, text, parsers, has_logprobs=False, is_single_call=prepared.is_single_call
        )


def _describe_call(call: choices.Call) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n'


async def connect(
    runtime: component.DistributedRuntime,
    name: instances.EndpointName,
    clock: clocks.Clock,
    requested_model: str | None = None,
) -> Session:
    """Open a session with the requested model at this endpoint; None: with the first one. Raises NoWorkers."""
    endpoint = runtime.client(name)
    await endpoint.wait_for_instances(FIND_S)

    async def read_cards() -> Sequence[model_card.CardRecord]:
        stored = await runtime.discovery.get_prefix(f"{instances.CARDS}{name.path}/")
        return [msgspec.json.decode(each, type=model_card.CardRecord) for each in stored.values()]

    records = await read_cards()
    if not records:
        raise errors.NoWorkers(f"{name} is served, but no model is: nothing to talk to")
    matching = [each for each in records if workers.serves(each.card_json, requested_model)]
    if not matching:
        served = ", ".join(sorted({each.card_json.display_name for each in records}))
        raise errors.NoWorkers(f"{name} serves {served}, not {requested_model}")
    card = await _fetch_card(runtime, endpoint, matching[0], clock)
    options = tokenize.TokenizerOptions(findings=tokenizer_library.FindingsDirectory.of_user())
    processor = await asyncio.to_thread(
        loading.load_preprocessor, card, clock, tokenizer_options=options
    )

    async def find_workers() -> Collection[int]:  # workers with other models may share the endpoint
        return {
            each.instance_id
            for each in await read_cards()
            if each.card_json.display_name == card.display_name
        }

    return Session(endpoint, processor, card.display_name, clock, find_workers)


async def _fetch_card(
    runtime: component.DistributedRuntime,
    endpoint: client.EndpointClient,
    record: model_card.CardRecord,
    clock: clocks.Clock,
) -> model_card.ModelCard:
    """Return the card with paths of files on this machine, fetched from the worker if needed. Raises ConfigError."""
    plane = runtime.requests
    fetcher = file_fetcher.FileFetcher(
        plane, runtime.services, file_fetcher.cache_directory(None), clock
    )
    instance = endpoint.instances.get(record.instance_id)
    provider = file_fetcher.FileProvider.of(instance, plane.name) if instance is not None else None
    return await fetcher.fetch_files(record.card_json, (provider,) if provider is not None else ())


T = TypeVar("T")
_CANCEL_S = 2.0


class BackgroundLoop:
    """`with BackgroundLoop() as loop: loop.call(coroutine)`."""

    def __enter__(self) -> "BackgroundLoop":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if kind is not KeyboardInterrupt:  # a library may be imported there, and the process ends
            self._thread.join()
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result; Ctrl-C cancels it and is raised when it has ended."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            ended.wait(_CANCEL_S)
            raise KeyboardInterrupt from None


def answer_standard_input(loop: BackgroundLoop, talk: Session, fields: dict[str, Any]) -> None:
    """Answer all of standard input as one prompt. Raises ConfigError if it is empty, or no text."""
    try:
        text = sys.stdin.read().strip() if sys.stdin else ""
        text.encode()  # some locales let bytes pass that are no UTF-8
    except UnicodeError as error:
        raise errors.ConfigError(f"in=stdin: expected text in UTF-8: {error}") from error
    if not text:
        raise errors.ConfigError("in=stdin: expected a prompt on standard input, got nothing")
    loop.call(talk.chat([{"role": "user", "content": text}], _print_piece, **fields))
    print()


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)
