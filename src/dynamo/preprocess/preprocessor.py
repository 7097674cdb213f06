"""From a request of the API to the one internal request: the model's template, tokens, limits and defaults.

One `Preprocessor` stands for one model, made from its card (`loading`). It also knows the way back (`answer`).
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.preprocess import (
    choice_text,
    conversation,
    detokenize,
    effort,
    generation_defaults,
    guiding,
    infill,
    options,
    template,
    thinking_limit,
    tokenize,
)
from dynamo.preprocess.parsers import formats, parser
from dynamo.protocols import (
    anthropic_blocks,
    blocks,
    generate,
    openai_chat,
    openai_completions,
    openai_embeddings,
)

DEFAULT_COMPLETION_LEN = 16  # of OpenAI's completions, where the request does not say


class Prepared(NamedTuple):
    """A request for an engine, and how to read the answer."""

    request: generate.Request
    prompt: str | None  # as text; None if it came as token ids
    parsers: parser.ParserFactory | None = None  # of its answers; None: all of them is content
    is_single_call: bool = False  # the answer ends with its first tool call


class Preprocessor:
    """Prepares requests for one model."""

    def __init__(
        self,
        *,
        tokenizer: tokenize.Tokenizer,
        chat_template: template.ChatTemplate | None,
        context_length: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        defaults: generation_defaults.GenerationDefaults,
        answer_format: formats.AnswerFormat,
        infill_format: str | None = None,
    ) -> None:
        self.text = detokenize.TextDecoder(tokenizer)
        self._marked_text = self.text.showing(answer_format.marks)
        self._answer_format = answer_format
        self._infill_format = infill_format
        self.context_length = context_length
        self._tokenizer = tokenizer
        self._template = chat_template
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._defaults = defaults
        self._lora_name: str | None = None

    def for_adapter(self, lora_name: str) -> "Preprocessor":
        """The same for a LoRA adapter of the model. They share tokenizer, template and what these remember."""
        made = copy.copy(self)
        made._lora_name = lora_name
        return made

    async def chat(
        self, request: openai_chat.ChatRequest, request_id: str, *, param: str = "messages"
    ) -> Prepared:
        """Raises RequestError, which names the field; `param` is what the prompt came in."""
        token_ids, prompt = await self.read_chat(request, param=param)
        max_tokens = options.answer_len(
            asked=request.max_completion_tokens or request.max_tokens,
            default=self._defaults.max_new_tokens,
            prompt_len=blocks.count(token_ids),
            context_length=self.context_length,
            param=param,
        )
        guided = self._guide(request, prompt)
        limit = thinking_limit.of(request, prompt, self._answer_format, self._tokenizer.id_of)
        prepared = self._assemble(request, request_id, token_ids, max_tokens, guided, limit)
        return Prepared(
            prepared,
            prompt,
            parsers=self._parsers_of(request, prompt),
            is_single_call=request.parallel_tool_calls is False or request.forced_tool is not None,
        )

    async def read_chat(
        self, request: openai_chat.ChatRequest, *, param: str = "messages"
    ) -> tuple[bytes, str]:
        """The prompt as packed token ids and as text, which may be somewhat too long. Raises RequestError."""
        if (given := request.extensions.token_data) is not None:
            packed = self._check_and_pack(given, "nvext.token_data")
            return packed, self.text.decode(packed)
        if request.extensions.use_raw_prompt:
            prompt = conversation.raw_prompt(request.messages)
            return await self.read_text(prompt, add_special_tokens=True, param=param), prompt
        options.check_messages(len(request.messages), self.context_length, param)
        prompt = self._render(request)
        options.check_text(len(prompt), self.context_length, param)
        return await self._tokenizer.encode_prompt(prompt), prompt

    async def read_text(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt"
    ) -> bytes:
        """Its packed token ids. Raises ContextTooLong."""
        options.check_text(len(text), self.context_length, param)
        (token_ids,) = await self._tokenizer.encode([text], add_special_tokens=add_special_tokens)
        return token_ids

    def write_text(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included. Raises RequestError."""
        options.check_text(len(token_ids), self.context_length, "tokens")
        options.check_ids(token_ids, self._vocab_size, "tokens")
        return self.text.decode(blocks.pack(token_ids))

    def vocabulary(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the tokenizer's vocabulary writes it."""
        return [self._tokenizer.tokens[token_id] for token_id in token_ids]

    async def completion(
        self, request: openai_completions.CompletionRequest, request_id: str
    ) -> list[Prepared]:
        """One for each prompt; of several, the ids are numbered. Raises RequestError, which names the field."""
        prompts = infill.prompts(request, self._infill_format)
        packed = await self._pack(prompts, request.prompt_param)
        is_alone = len(packed) == 1
        return [
            self._complete(
                request, request_id if is_alone else f"{request_id}-{number}", token_ids, prompt
            )
            for number, (token_ids, prompt) in enumerate(zip(packed, prompts, strict=True))
        ]

    async def embedding(self, request: openai_embeddings.EmbeddingRequest) -> list[bytes]:
        """Each input as packed token ids. Raises RequestError, which names the field."""
        packed = await self._pack(request.inputs, "input")
        options.check_inputs(list(map(blocks.count, packed)), self.context_length)
        return packed

    def answer(
        self, request: generate.Request, *, shows_marks: bool = False
    ) -> choice_text.ChoiceText:
        """For one choice of this request: turns the engine's outputs into text, for a parser if it shows marks."""
        decoder = self._marked_text if shows_marks else self.text
        return choice_text.ChoiceText(decoder.new(request.token_ids), request.stop_conditions)

    def _guide(
        self, request: openai_chat.ChatRequest, prompt: str
    ) -> generate.GuidedDecoding | None:
        """What the answer must look like, once it has thought. Raises InvalidRequest."""
        guided = guiding.of_chat(request, self._answer_format)
        if guided is None:
            return None
        try:
            may_think = request.template_args.get(anthropic_blocks.THINKING) is not False
            thoughts = self._answer_format.thoughts(prompt, may_think=may_think)
        except errors.InvalidRequest as error:
            raise errors.InvalidRequest(f"{guided.param}: {error}", param=guided.param) from error
        return msgspec.structs.replace(guided, thoughts=thoughts)

    def _parsers_of(
        self, request: openai_chat.ChatRequest, prompt: str
    ) -> parser.ParserFactory | None:
        """Of its choices; None if none is needed. Raises InvalidRequest."""
        form = self._answer_format
        if not request.allows_calls:
            return form.parsers(prompt, None)
        if request.must_call:
            form = dataclasses.replace(form, tools=form.forced)
        if form.tools is None:
            raise errors.InvalidRequest(
                f"tools: it is not known how the model {request.model!r} writes tool calls; leave them out, "
                "or start its worker with --dyn-tool-call-parser",
                param="tools",
            )
        return form.parsers(prompt, _schemas(request))

    def _render(self, request: openai_chat.ChatRequest) -> str:
        if self._template is None:
            raise errors.InvalidRequest(
                f"messages: the model {request.model!r} has no chat template; use /v1/completions",
                param="messages",
            )
        return self._template.render(
            conversation.for_template(
                request.messages, knows_developer=self._template.knows_developer
            ),
            tools=request.tools if request.allows_calls else None,
            add_generation_prompt=request.add_generation_prompt is not False,
            args=self._template_args(request, self._template.variables),
        )

    def _template_args(
        self, request: openai_chat.ChatRequest, variables: frozenset[str]
    ) -> dict[str, Any]:
        """What the caller says to the template in its own words counts more."""
        if request.reasoning_effort is None:
            return request.template_args
        can_think = self._answer_format.reasoning is not None
        told = effort.template_args(
            request.reasoning_effort, variables, can_think=can_think, param=request.effort_param
        )
        return {**told, **request.template_args}

    async def _pack(self, prompts: Sequence[openai_completions.Prompt], param: str) -> list[bytes]:
        """Token ids of all prompts, which are either texts or ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            options.check_text(len(text), self.context_length, param)
        if texts:
            return await self._tokenizer.encode(texts, add_special_tokens=True)
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return [self._check_and_pack(one, param) for one in ids]

    def _check_and_pack(self, token_ids: Sequence[int], param: str) -> bytes:
        options.check_text(len(token_ids), self.context_length, param)
        options.check_ids(token_ids, self._vocab_size, param)
        return blocks.pack(token_ids)

    def _complete(
        self,
        request: openai_completions.CompletionRequest,
        request_id: str,
        token_ids: bytes,
        prompt: openai_completions.Prompt,
    ) -> Prepared:
        max_tokens = options.answer_len(
            asked=1 if request.is_scored else request.max_tokens,  # no engine can draw none
            default=DEFAULT_COMPLETION_LEN,
            prompt_len=blocks.count(token_ids),
            context_length=self.context_length,
            param="prompt",
        )
        guided = guiding.of_fields(request)
        prepared = self._assemble(request, request_id, token_ids, max_tokens, guided)
        return Prepared(prepared, prompt if isinstance(prompt, str) else None)

    def _assemble(
        self,
        request: openai_chat.ChatRequest | openai_completions.CompletionRequest,
        request_id: str,
        token_ids: bytes,
        max_tokens: int,
        guided: generate.GuidedDecoding | None,
        limit: generate.ThinkingLimit | None = None,
    ) -> generate.Request:
        hints = request.extensions.agent_hints
        return generate.Request(
            id=request_id,
            model=request.model,
            token_ids=token_ids,
            stop_conditions=options.stop_conditions(request, max_tokens, self._vocab_size),
            sampling_options=options.sampling(request, self._defaults, self._vocab_size, guided),
            output_options=options.output(request),
            eos_token_ids=self._eos_token_ids,
            annotations=tuple(request.extensions.annotations or ()),
            priority=request.urgency,
            lora_name=self._lora_name,
            thinking=limit,
            session_id=request.session_id,
            expected_output_tokens=hints.osl if hints else None,
        )


def _schemas(request: openai_chat.ChatRequest) -> parser.ToolSchemas:
    """The parameters of each tool, as far as they are told."""
    functions = [tool["function"] for tool in request.tools or ()]
    return {
        one["name"]: found if isinstance(found := one.get("parameters"), dict) else {}
        for one in functions
    }
