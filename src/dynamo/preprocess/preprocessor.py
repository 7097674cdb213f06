"""The preprocessor of one model: from an API's request to the internal request, by template, tokenizer and limits.

It is built from the model card (`loading`). It also makes the decoders for the way back (`make_answer_text`).
"""

import asyncio
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.preprocess import (
    conversation,
    detokenize,
    guiding,
    images,
    infill,
    inputs,
    options,
    template,
    tokenize,
)
from dynamo.preprocess.parsers import formats, parser
from dynamo.protocols import blocks, generate, limits

DEFAULT_COMPLETION_LEN = 16  # tokens, OpenAI's default for completions
# Messages and calls, which take some milliseconds to adapt; more are adapted in a thread.
_MANY_MESSAGES = 1000


class Prepared(msgspec.Struct, frozen=True):
    """A request for an engine, and how to read its answers."""

    request: generate.Request
    prompt: str | None  # as text; None if it came as token ids
    parsers: parser.ParserFactory | None = None  # of its answers; None if all text is content
    is_single_call: bool = False  # the answer ends with its first tool call

    def with_request(self, request: generate.Request) -> "Prepared":
        """Return the same prompt with another form of its request."""
        return msgspec.structs.replace(self, request=request)


class Preprocessor:
    """Prepares the requests for one model."""

    def __init__(
        self,
        *,
        tokenizer: tokenize.Tokenizer,
        chat_template: template.ChatTemplate | None,
        context_length: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        defaults: options.GenerationDefaults,
        answer_format: formats.AnswerFormat,
        infill_format: str | None = None,
    ) -> None:
        self.text = detokenize.TextDecoder(tokenizer)
        self._marked_text = self.text.showing(answer_format.marks)
        self._answer_format = answer_format
        self.infill_format = infill_format
        self.special_tokens = tokenizer.special_tokens
        self.context_length = context_length
        self._tokenizer = tokenizer
        self._template = chat_template
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._defaults = defaults
        self._images = images.TEXT_ONLY
        self._can_limit_thinking = True
        self._lora_name: str | None = None

    @property
    def template_source(self) -> str:
        """The text of the chat template; empty if the model has none."""
        return "" if self._template is None else self._template.source

    def for_adapter(self, lora_name: str) -> "Preprocessor":
        """Return a preprocessor for a LoRA adapter of the model, which shares tokenizer, template and their caches."""
        adapted = copy.copy(self)
        adapted._lora_name = lora_name
        return adapted

    def with_images(self, image_input: images.ImageInput) -> "Preprocessor":
        """Return a preprocessor that takes images, too."""
        seeing = copy.copy(self)
        seeing._images = image_input
        return seeing

    def without_thinking_limits(self) -> "Preprocessor":
        """Return a preprocessor for an engine that cannot limit thoughts."""
        unlimited = copy.copy(self)
        unlimited._can_limit_thinking = False
        return unlimited

    @property
    def capabilities(self) -> Sequence[str]:
        """Return `tools` and `reasoning`, as far as it is known how the model writes them."""
        form = self._answer_format
        return [name for name in ("tools", "reasoning") if getattr(form, name) is not None]

    async def prepare_conversation(
        self, request: inputs.Conversation, request_id: str, *, param: str = "messages"
    ) -> Prepared:
        """Prepare a conversation, which has one prompt; `param` is the field that held it.

        Raises RequestError, which names the field.
        """
        files = self._images.read(request.messages)
        token_ids, prompt = await self._tokenize_messages(request, param)
        requested = request.max_completion_tokens or request.max_tokens
        if request.truncate_prompt_tokens is not None:
            token_ids = self._truncate(token_ids, request, requested)
        fits_context = request.fits_context
        max_tokens = options.limit_answer_len(
            requested=None if fits_context else requested,
            default=(requested if fits_context else None) or self._defaults.max_new_tokens,
            prompt_len=blocks.count(token_ids),
            context_length=self.context_length,
            param=param,
        )
        ending = self._find_ending(request, prompt) if request.continue_final_message else prompt
        sampling = await self._make_sampling(request, self._guide(request, ending))
        limit = options.make_thinking_limit(
            request,
            ending,
            self._answer_format,
            self._tokenizer.id_of,
            can_limit=self._can_limit_thinking,
        )
        engine_request = self._assemble(request, request_id, token_ids, max_tokens, sampling, limit)
        if files:
            text_len = self._images.count_text(token_ids)
            engine_request = msgspec.structs.replace(
                engine_request, images=files, text_len=text_len
            )
        return Prepared(
            engine_request,
            prompt,
            parsers=self._select_parsers(request, ending),
            is_single_call=request.parallel_tool_calls is False or request.forced_tool is not None,
        )

    async def tokenize_conversation(
        self, request: inputs.Conversation, *, param: str = "messages"
    ) -> tuple[bytes, str]:
        """Return the prompt as packed token ids and as text.

        It may be longer than the context; a text that cannot fit raises ContextTooLong. Raises RequestError.
        """
        self._images.find(request.messages)
        return await self._tokenize_messages(request, param)

    async def _tokenize_messages(
        self, request: inputs.Conversation, param: str
    ) -> tuple[bytes, str]:
        """Return the same for messages of which the images are known to be allowed."""
        extensions = request.extensions
        if extensions.token_data is not None:
            packed = self._check_and_pack(extensions.token_data, "nvext.token_data")
            most = self.context_length * blocks.TOKEN_BYTES  # longer prompts are cut or refused
            return packed, self.text.decode(packed[-most:])
        if extensions.use_raw_prompt:
            prompt = conversation.extract_raw_prompt(request.messages)
            return await self.tokenize_text(prompt, add_special_tokens=True, param=param), prompt
        options.check_num_messages(len(request.messages), self.context_length, param)
        began_at = time.perf_counter()
        prompt = await self._render(request)
        rendered_at = time.perf_counter()
        if request.add_special_tokens:
            return await self.tokenize_text(prompt, add_special_tokens=True, param=param), prompt
        options.check_text(len(prompt), self.context_length, param)
        token_ids = await self._tokenizer.encode_prompt(prompt)
        self._tokenizer.cache_observer.record_times(
            template_s=rendered_at - began_at, tokenize_s=time.perf_counter() - rendered_at
        )
        return token_ids, prompt

    async def tokenize_text(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt"
    ) -> bytes:
        """Return the packed token ids of a text. Raises ContextTooLong."""
        options.check_text(len(text), self.context_length, param)
        (token_ids,) = await self._tokenizer.encode([text], add_special_tokens=add_special_tokens)
        return token_ids

    def detokenize_ids(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens included. Raises RequestError."""
        options.check_text(len(token_ids), self.context_length, "tokens")
        options.check_ids(token_ids, self._vocab_size, "tokens")
        return self.text.decode(blocks.pack(token_ids))

    def list_vocabulary(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the tokenizer's vocabulary spells it."""
        return [self._tokenizer.token_of(token_id) for token_id in token_ids]

    async def prepare_prompts(
        self,
        request: inputs.GenerationInput,
        request_id: str,
        *,
        prompts: Sequence[inputs.Prompt],
        suffix: str | None = None,
        param: str = "prompt",
    ) -> list[Prepared]:
        """Prepare prompts to continue, one request for each; the ids of several are numbered.

        Raises RequestError, which names `param`.
        """
        joined = infill.join_prompts(prompts, suffix, self.infill_format, request.model)
        packed = await self._tokenize_all(
            joined, param, add_special_tokens=request.add_special_tokens is not False
        )
        if request.truncate_prompt_tokens is not None:
            packed = [
                self._truncate(token_ids, request, request.max_tokens) for token_ids in packed
            ]
        sampling = await self._make_sampling(request, guiding.from_fields(request))
        return [
            self._prepare_prompt(
                request,
                request_id if len(packed) == 1 else f"{request_id}-{number}",
                token_ids,
                prompt,
                sampling,
            )
            for number, (token_ids, prompt) in enumerate(zip(packed, joined, strict=True))
        ]

    async def tokenize_embedding_inputs(
        self,
        texts: Sequence[inputs.Prompt],
        place_of: Callable[[int], tuple[str, int]],
        *,
        cuts: bool = False,
    ) -> list[bytes]:
        """Return each input of an embedding request as packed token ids; with `cuts`, as many as the context holds.

        Raises RequestError, which names the field of the input, and its number there, as `place_of` returns them.
        """
        if cuts:
            texts = [text[: options.max_text_len(self.context_length)] for text in texts]
        param, _ = place_of(len(texts) - 1)
        num_ids = sum(len(ids) for ids in texts if not isinstance(ids, str))
        options.check_num_embedded(num_ids, param)  # before each is looked at, on the event loop
        packed = await self._tokenize_all(texts, param)
        if cuts:
            packed = [self._tokenizer.cut_end(ids, self.context_length) for ids in packed]
        lengths = list(map(blocks.count, packed))
        options.check_embedding_inputs(lengths, self.context_length, place_of)
        return packed

    def make_answer_text(
        self,
        request: generate.Request,
        shown: inputs.EngineFields | None = None,
        *,
        shows_marks: bool = False,
    ) -> detokenize.ChoiceText:
        """Return the decoder for one answer to this request; a parser needs one that shows the format's marks.

        `shown` says whether special tokens and stop strings are part of the text; by default they are not.
        """
        decoder = self._marked_text if shows_marks else self.text
        shows_special = shown is not None and shown.skip_special_tokens is False
        return detokenize.ChoiceText(
            decoder.new(request.token_ids, skip_special_tokens=not shows_special),
            request.stop_conditions,
            keeps_stop=shown is not None and bool(shown.include_stop_str_in_output),
        )

    def _truncate(
        self, token_ids: bytes, request: inputs.EngineFields, max_tokens: int | None
    ) -> bytes:
        """Return the end of a prompt, or its beginning, of as many tokens as the request says.

        With -1 these are as many as fit beside an answer of `max_tokens`.
        """
        most = request.truncate_prompt_tokens or 0
        if most == -1:
            most = max(self.context_length - (max_tokens or 1), 1)
        num_bytes = most * blocks.TOKEN_BYTES
        if request.truncation_side == "right":
            return token_ids[:num_bytes]
        return token_ids[max(0, len(token_ids) - num_bytes) :]

    def _find_ending(self, request: inputs.Conversation, prompt: str) -> str:
        """Return the end of the prompt, which says whether the answer begins with a thought.

        An answer that continues a message, as this one, does not, unless the message breaks off within one.
        """
        marks = self._answer_format.thought_marks
        if marks is None:
            return prompt
        message = conversation.text_of(request.messages[-1].get("content"))
        return prompt if marks.breaks_off_in(message) else marks.closes[0]

    def _guide(self, request: inputs.Conversation, prompt: str) -> generate.GuidedDecoding | None:
        """Return the grammar of the answer and the thoughts that may precede it. Raises InvalidRequest."""
        guided = guiding.from_conversation(request, self._answer_format)
        if guided is None:
            return None
        try:
            may_think = options.asks_to_think(request)
            thoughts = self._answer_format.thoughts(prompt, may_think=may_think)
        except errors.InvalidRequest as error:
            raise errors.InvalidRequest.of_param(guided.param, f"{error}") from error
        return msgspec.structs.replace(guided, thoughts=thoughts)

    def _select_parsers(
        self, request: inputs.Conversation, prompt: str
    ) -> parser.ParserFactory | None:
        """Return the parsers of the answers; None if all text is content. Raises InvalidRequest."""
        answer_format = self._answer_format
        if not request.allows_calls:
            return answer_format.parsers(prompt, None)
        if request.must_call:
            answer_format = dataclasses.replace(answer_format, tools=answer_format.forced)
        if answer_format.tools is None:
            raise errors.InvalidRequest.of_param(
                "tools",
                f"it is not known how the model {request.model!r} writes tool calls; leave them out, "
                "or start its worker with --dyn-tool-call-parser",
            )
        functions = [tool["function"] for tool in request.allowed_tools]
        schemas = {
            function["name"]: schema
            if isinstance(schema := function.get("parameters"), dict)
            else {}
            for function in functions
        }
        return answer_format.parsers(
            prompt,
            schemas,
            is_forced=request.must_call,
            whole_tools=request.whole_tools,
        )

    async def _render(self, request: inputs.Conversation) -> str:
        if self._template is None:
            raise errors.InvalidRequest.of_param(
                "messages", f"the model {request.model!r} has no chat template; use /v1/completions"
            )
        chat_template = self._template
        if request.chat_template is not None:
            chat_template = await chat_template.replaced_by(request.chat_template)
        args = request.template_args
        if request.reasoning_effort is not None:
            effort_args = options.make_effort_args(
                request.reasoning_effort,
                chat_template.variables,
                can_think=self._answer_format.reasoning is not None,
                param=request.effort_param,
            )
            args = {**effort_args, **args}  # the caller's own variables win
        size = len(request.messages)
        for message in request.messages:
            if "tool_calls" in message:
                size += len(message["tool_calls"] or ())
        if size > _MANY_MESSAGES:
            messages = await asyncio.to_thread(_adapt_messages, request, chat_template)
        else:
            messages = _adapt_messages(request, chat_template)
        is_continued = bool(request.continue_final_message)
        render = functools.partial(
            chat_template.render,
            messages,
            add_generation_prompt=not is_continued and request.add_generation_prompt is not False,
            args=args,
        )
        tools = (request.allowed_tools or None) if request.tools else None
        try:
            prompt = await render(tools=tools)
        except errors.InvalidRequest:
            completed = conversation.complete_tools(tools or [])
            if completed == (tools or []):
                raise
            prompt = await render(tools=completed)
        return conversation.cut_at_mark(prompt) if is_continued else prompt

    async def _tokenize_all(
        self, prompts: Sequence[inputs.Prompt], param: str, *, add_special_tokens: bool = True
    ) -> list[bytes]:
        """Return the packed token ids of all prompts, which are either all texts or all ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            options.check_text(len(text), self.context_length, param)
        if texts:
            return await self._tokenizer.encode(texts, add_special_tokens=add_special_tokens)
        id_lists = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return [self._check_and_pack(token_ids, param) for token_ids in id_lists]

    async def _make_sampling(
        self, request: inputs.GenerationInput, guided: generate.GuidedDecoding | None
    ) -> generate.SamplingOptions:
        """Return how the answers to all prompts of a request are sampled. Raises InvalidRequest."""
        if guided is not None:  # the types have checked the rest
            limits.check_guided(guided)
        banned_ids = await self._ban_words(request.bad_words) if request.bad_words else ()
        return options.make_sampling(request, self._defaults, self._vocab_size, guided, banned_ids)

    async def _ban_words(self, words: Sequence[str]) -> Sequence[int]:
        """Return the tokens of words that must not come. Raises InvalidRequest for a word of several tokens.

        A word has a token at the beginning of a line, and another after a space.
        """
        banned: list[int] = []
        forms = [form for word in words for form in (word, " " + word.lstrip())]
        packed = iter(await self._tokenizer.encode(forms, add_special_tokens=False))
        for number, (word, *pair) in enumerate(zip(words, packed, packed, strict=True)):
            single = [blocks.unpack(ids)[0] for ids in pair if blocks.count(ids) == 1]
            if not single:
                param = f"bad_words[{number}]"
                raise errors.InvalidRequest.of_param(
                    param, f"expected a word that is one token of this model, got {word!r:.60}"
                )
            banned += single
        return banned

    def _check_and_pack(self, token_ids: Sequence[int], param: str) -> bytes:
        options.check_text(len(token_ids), self.context_length, param)
        options.check_ids(token_ids, self._vocab_size, param)
        return blocks.pack(token_ids)

    def _prepare_prompt(
        self,
        request: inputs.GenerationInput,
        request_id: str,
        token_ids: bytes,
        prompt: inputs.Prompt,
        sampling: generate.SamplingOptions,
    ) -> Prepared:
        max_tokens = options.limit_answer_len(
            requested=1 if request.is_scored else request.max_tokens,  # no engine can draw none
            default=DEFAULT_COMPLETION_LEN,
            prompt_len=blocks.count(token_ids),
            context_length=self.context_length,
            param="prompt",
        )
        engine_request = self._assemble(request, request_id, token_ids, max_tokens, sampling)
        return Prepared(engine_request, prompt if isinstance(prompt, str) else None)

    def _assemble(
        self,
        request: inputs.GenerationInput,
        request_id: str,
        token_ids: bytes,
        max_tokens: int,
        sampling: generate.SamplingOptions,
        limit: generate.ThinkingLimit | None = None,
    ) -> generate.Request:
        extensions = request.extensions
        hints = extensions.agent_hints
        return generate.Request(
            id=request_id,
            model=request.model,
            token_ids=token_ids,
            stop_conditions=options.make_stop_conditions(request, max_tokens, self._vocab_size),
            sampling_options=sampling,
            output_options=options.make_output(request),
            eos_token_ids=self._eos_token_ids,
            annotations=tuple(extensions.annotations or ()),
            priority=request.scheduling_priority,
            lora_name=self._lora_name,
            cache_hint=options.make_cache_hint(request),
            thinking=limit,
            session_id=request.session_id,
            expected_output_tokens=hints.osl if hints else None,
        )


def _adapt_messages(
    request: inputs.Conversation, chat_template: template.ChatTemplate
) -> list[dict[str, Any]]:
    """Return the messages as this template expects them. Raises InvalidRequest."""
    messages = request.messages
    if chat_template.needs_single_calls:
        messages = conversation.split_calls(messages)
    messages = conversation.adapt_for_template(
        messages,
        knows_developer=chat_template.knows_developer,
        wants_text_arguments=chat_template.needs_text_arguments,
        reads_thinking=chat_template.reads_thinking,
        reads_null=chat_template.reads_null,
    )
    if chat_template.writes_call_ids:
        messages = conversation.name_calls(messages)
    if chat_template.needs_short_ids:
        messages = conversation.shorten_ids(messages)
    if request.continue_final_message:
        messages = conversation.mark_end(messages)
    return conversation.split_texts(messages) if chat_template.needs_parts else messages
