"""Sampling options, stop conditions and limits of a request.

They come from the request's fields, the model's defaults (generation_config.json) and its context length. Where several
set the same value, the first of these wins: the root of the request, its `nvext`, the model's files, OpenAI's default.

Chat templates have two ways to set how hard a model thinks: Qwen3, GLM and DeepSeek-V3.1 have a switch, gpt-oss reads
the effort itself. A template with neither cannot be controlled, and a request that sets an effort is then refused. A
limit of thinking is counted in tokens, so it can be kept only where a single token of the model ends a thought.
"""  # decider

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.preprocess import inputs
from dynamo.preprocess.parsers import formats
from dynamo.protocols import generate, model_card, model_errors

BAN_BIAS = -100.0  # of a token that does not come
MIN_TEXT_CHARS = 2**18  # that any text may have, however short the context
CHARS_PER_TOKEN = 16  # more than any language has on average; three to five are usual
MAX_LOGPROBS = 2**20  # of an answer, or of the prompts that it repeats: some 80 MB of JSON
MAX_EMBEDDING_TOKENS = 300_000  # of all inputs of a request together, OpenAI's limit


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling defaults in generation_config.json, or OpenAI's where the file sets no value."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # None: as many as fit


def read_defaults(generation_config: dict[str, Any]) -> GenerationDefaults:
    """Return the defaults in this decoded generation_config.json. Raises ConfigError."""
    try:
        values = {name: value for name, value in generation_config.items() if value is not None}
        return msgspec.convert(values, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise errors.ConfigError(f"generation_config.json: {error}") from error


def collect_eos_token_ids(
    configs: Iterable[dict[str, Any]], tokenizer_eos_id: int | None
) -> tuple[int, ...]:
    """Return every token id that ends an answer: `eos_token_id` of each configuration, and the tokenizer's own."""
    candidates: list[Any] = []
    for config in configs:
        value = config.get("eos_token_id")
        candidates += value if isinstance(value, list) else [value]
    candidates.append(tokenizer_eos_id)
    return tuple(dict.fromkeys(token_id for token_id in candidates if type(token_id) is int))


def make_sampling(
    request: inputs.GenerationInput,
    defaults: GenerationDefaults,
    vocab_size: int,
    guided: generate.GuidedDecoding | None = None,
    banned_ids: Sequence[int] = (),
) -> generate.SamplingOptions:
    """Return how the engine samples tokens, of which `banned_ids` do not come. Raises InvalidRequest."""
    temperature, top_k = request.temperature, request.top_k
    repetition_penalty = request.repetition_penalty
    if (extensions := request.nvext) is not None:
        temperature = 0.0 if extensions.greed_sampling else temperature
        top_k = extensions.top_k if top_k is None else top_k
        if repetition_penalty is None:
            repetition_penalty = extensions.repetition_penalty
    if request.logit_bias:
        check_ids(request.logit_bias, vocab_size, "logit_bias")
    if request.allowed_token_ids is not None:
        check_ids(request.allowed_token_ids, vocab_size, "allowed_token_ids")
    logit_bias = request.logit_bias or {}
    if banned_ids:
        logit_bias = logit_bias | dict.fromkeys(banned_ids, BAN_BIAS)
    return generate.SamplingOptions(
        n=request.num_drawn,
        temperature=defaults.temperature if temperature is None else temperature,
        top_k=max(defaults.top_k if top_k is None else top_k, 0),
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        repetition_penalty=defaults.repetition_penalty
        if repetition_penalty is None
        else repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        logit_bias=logit_bias,
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        guided_decoding=guided,
    )


def make_cache_hint(request: inputs.GenerationInput) -> generate.CacheHint | None:
    """Return the wish to keep the request's blocks in the cache tiers; None if it has none."""
    retention: inputs.CacheRetention | None = getattr(request, "prompt_cache_retention", None)
    control = None if request.nvext is None else request.nvext.cache_control
    if control is None and retention is None:
        return None
    ttl = control.ttl if control is not None else "24h" if retention == "24h" else None
    return generate.CacheHint(
        ttl_s=_TTL_S[ttl] if ttl else 0,
        is_pinned=control is not None and control.pin,
        is_memory_only=retention is not None and retention != "24h",
    )


def make_output(request: inputs.GenerationInput) -> generate.OutputOptions:
    """Return what the engine reports. The best of several answers is chosen by their log probabilities."""
    num_logprobs = request.num_logprobs
    if num_logprobs is None and request.prompt_logprobs is None and not request.is_best_of:
        return generate.OutputOptions()
    of_prompt = (request.prompt_logprobs, num_logprobs if request.is_echoed else None)
    return generate.OutputOptions(
        logprobs=0 if num_logprobs is None and request.is_best_of else num_logprobs,
        prompt_logprobs=max((num for num in of_prompt if num is not None), default=None),
    )


def check_repeated(request: inputs.GenerationInput, num_tokens: int) -> None:
    """Raise InvalidRequest if the answers would repeat too much of the prompts, in all `num_tokens`, counted each time.

    A token counts once for its text or id, and once for each of its log probabilities.
    """
    if request.prompt_logprobs is None and not (request.return_token_ids or request.is_echoed):
        return  # nearly always so
    num_logprobs = 1 if request.num_logprobs is None else 2 + request.num_logprobs
    num_by_param = {
        "echo": num_logprobs if request.is_echoed else 0,
        "prompt_logprobs": 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs,
        "return_token_ids": int(bool(request.return_token_ids)),
    }
    num = num_tokens * sum(num_by_param.values())
    if num > MAX_LOGPROBS:
        raise errors.InvalidRequest.of_param(
            max(num_by_param, key=num_by_param.__getitem__),
            f"expected at most {MAX_LOGPROBS} tokens and log probabilities of prompts in all answers together, "
            f"got {num}: ask for fewer of them, or split the request",
        )


def make_stop_conditions(
    request: inputs.GenerationInput, max_tokens: int, vocab_size: int
) -> generate.StopConditions:
    """Return when an answer ends. Raises InvalidRequest."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise errors.InvalidRequest.of_param(
            "min_tokens",
            f"expected at most the {max_tokens} tokens that may come, got {min_tokens}",
        )
    if request.stop_token_ids:
        check_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    ignore_eos = request.ignore_eos
    if ignore_eos is None and request.nvext is not None:
        ignore_eos = request.nvext.ignore_eos
    return generate.StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=request.stop_strings,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(ignore_eos),
    )


def limit_answer_len(
    *, requested: int | None, default: int | None, prompt_len: int, context_length: int, param: str
) -> int:
    """Return the most tokens that the answer may have: the requested number, else the default, within the context.

    Raises RequestError, which names `param`, for an empty prompt and for what cannot fit the context.
    """
    if not prompt_len:
        raise errors.InvalidRequest.of_param(param, "expected at least one token, got none")
    num_left = context_length - prompt_len
    if requested is not None and requested > num_left:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{prompt_len + requested} tokens ({prompt_len} in the {param}, {requested} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
        )
    if num_left < 1:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens, prompt and completion "
            f"together. However, your {param} resulted in {prompt_len} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
        )
    length = default if requested is None else requested
    return num_left if length is None else min(length, num_left)


def max_text_len(context_length: int) -> int:
    """Return the most characters, or token ids, of a text that is tokenized for a context."""
    return max(MIN_TEXT_CHARS, context_length * CHARS_PER_TOKEN)


def check_text(length: int, context_length: int, param: str) -> None:
    """Raise ContextTooLong for a text (or list of token ids) that cannot fit the context, before it is tokenized.

    A tokenizer takes 100 bytes and a microsecond for each character. The most characters of a token are unknown (some
    tokenizers have one token for a whole run of blanks), so the bound is generous: a text beyond it is at least three
    times too long.
    """
    max_length = max_text_len(context_length)
    if length > max_length:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. However, your {param} has the "
            f"length {length}; expected at most {max_length} characters or ids. "
            f"Please reduce the length of the {param}.",
            param=param,
        )


def check_num_messages(num_messages: int, context_length: int, param: str) -> None:
    """Raise ContextTooLong for more messages than the context has tokens, before they are rendered."""
    if num_messages > context_length:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. However, your {param} "
            f"has {num_messages} parts, of at least one token each. Please reduce their number.",
            param=param,
        )


def check_embedding_inputs(
    lengths: Sequence[int], context_length: int, place_of: Callable[[int], tuple[str, int]]
) -> None:
    """Raise RequestError unless inputs of these lengths in tokens can be embedded.

    `place_of` maps the number of an input to its field, and to its number there.
    """
    for number, length in enumerate(lengths):
        param, place = place_of(number)
        if not length:
            raise errors.InvalidRequest.of_param(
                param, f"expected at least one token in each, got none in number {place}"
            )
        if length > context_length:
            raise model_errors.ContextTooLong(
                f"This model's maximum context length is {context_length} tokens. However, {param} number "
                f"{place} has {length} tokens. Please reduce its length.",
                param=param,
            )
    check_num_embedded(sum(lengths), place_of(len(lengths) - 1)[0])


def check_dimensions(dimensions: int | None, facts: model_card.EmbeddingFacts) -> None:
    """Raise InvalidRequest if the model makes no vectors of this length; None is its full length."""
    if dimensions in (None, facts.dimensions) or (
        facts.can_shorten and dimensions in (facts.lengths or range(1, facts.dimensions))
    ):
        return
    if not facts.can_shorten:
        expected = f"{facts.dimensions} or nothing, as this model's vectors cannot be shortened"
    elif facts.lengths:
        expected = f"one of {', '.join(map(str, facts.lengths))}"
    else:
        expected = f"from 1 to {facts.dimensions}"
    raise errors.InvalidRequest.of_param("dimensions", f"expected {expected}, got {dimensions}")


def check_num_embedded(num_tokens: int, param: str) -> None:
    """Raise InvalidRequest for more tokens than all inputs of a request may have together."""
    if num_tokens > MAX_EMBEDDING_TOKENS:
        raise errors.InvalidRequest.of_param(
            param,
            f"expected at most {MAX_EMBEDDING_TOKENS} tokens in all inputs together, got {num_tokens}",
        )


def check_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if one of the ids is no token of the model."""
    highest, lowest = max(token_ids, default=0), min(token_ids, default=0)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise errors.InvalidRequest.of_param(
            param, f"expected token ids from 0 to {vocab_size - 1}, got {wrong}"
        )


EFFORTS = ("reasoning_effort", "thinking_effort")  # the second in Kimi K3's template
SWITCHES = ("enable_thinking", "thinking")
NO_EFFORT = "none"  # the effort that disables thinking
_TTL_S = {"5m": 300, "1h": 3600, "24h": 86_400}
LIMIT_PARAM = "nvext.max_thinking_tokens"


def make_effort_args(
    effort: str, variables: Set[str], *, can_think: bool, param: str
) -> dict[str, Any]:
    """Return the values for a template that reads `variables`; none where it cannot be told how hard to think.

    Raises InvalidRequest, which names `param`, if the model thinks and its template cannot be told not to.
    """
    args: dict[str, Any] = {name: effort != NO_EFFORT for name in SWITCHES if name in variables}
    if effort != NO_EFFORT:
        args |= {name: effort for name in EFFORTS if name in variables}
    if not args and effort == NO_EFFORT and can_think:
        raise errors.InvalidRequest.of_param(
            param,
            f"the chat template of this model cannot be told not to think; leave it out, got {effort!r}",
        )
    return args


def asks_to_think(request: inputs.Conversation) -> bool:
    """Return whether the request turns thinking on, by a switch of the template, an effort or a limit."""
    return (
        any(request.template_args.get(name) is True for name in SWITCHES)
        or request.reasoning_effort not in (None, NO_EFFORT)
        or bool(request.max_thinking_tokens)
    )


def make_thinking_limit(
    request: inputs.Conversation,
    prompt: str,
    answer_format: formats.AnswerFormat,
    id_of: Callable[[str], int | None],
    *,
    can_limit: bool = True,
) -> generate.ThinkingLimit | None:
    """Return the limit that the engine enforces; None without a limit, or if it cannot be kept and need not be.

    `id_of` maps a mark's text to its token id; `can_limit` says whether the engine keeps limits. Raises InvalidRequest
    if the limit must be kept and cannot be.
    """
    max_tokens = request.max_thinking_tokens
    if max_tokens is None:
        return None
    marks = answer_format.thought_marks
    close_ids = _find_ids(marks.closes, id_of) if marks is not None and can_limit else ()
    if marks is None or not close_ids:
        if request.must_limit_thinking:
            reason = "no token of this model is known to end a thought"
            if not can_limit:
                reason = "the engine of this model cannot limit thoughts"
            raise errors.InvalidRequest.of_param(
                LIMIT_PARAM if request.thinking_token_budget is None else "thinking_token_budget",
                f"{reason}; leave it out, got {max_tokens}",
            )
        return None
    return generate.ThinkingLimit(
        max_tokens=max_tokens,
        close_ids=close_ids,
        open_ids=_find_ids(marks.opens, id_of),
        is_open=marks.begins_in(prompt),
    )


def _find_ids(texts: tuple[str, ...], id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    return tuple(token_id for token_id in map(id_of, texts) if token_id is not None)
