"""Checks of a request before an engine accepts it, so that an invalid one cannot fail a step and harm other requests.

The frontend has refused most of these already, with its own messages; but an engine may have other callers.
`protocols.limits` has what does not depend on the engine.
"""  # decider

from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import blocks, generate, limits, model_errors


def check(
    request: generate.Request,
    facts: api.EngineFacts,
    *,
    vocab_size: int | None,
    is_id_open: bool = False,
) -> None:
    """Raise RequestError if no engine with these facts can serve the request, WorkerLost if another worker may.

    With `vocab_size` None any token id is accepted. `is_id_open`: a request of the same id has not ended.
    """
    if is_id_open:
        raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
    limits.check(request)
    _check_prompt(request, facts.context_length)
    if not 0 <= request.num_resumed < request.prompt_len:
        raise limits.invalid("num_resumed", f"below {request.prompt_len}", request.num_resumed)
    if vocab_size is not None:
        _check_tokens(request, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        num_logprobs = getattr(request.output_options, name)
        if num_logprobs is not None and not 0 <= num_logprobs <= facts.max_top_logprobs:
            raise limits.invalid(name, f"from 0 to {facts.max_top_logprobs}", num_logprobs)
    _check_guided(request, facts)
    if len(request.images) > facts.max_images:
        raise limits.invalid("images", f"at most {facts.max_images}", len(request.images))
    if request.lora_name not in (None, *facts.lora_names):
        names = ", ".join(facts.lora_names) or "none"
        raise errors.WorkerLost(  # the caller has read a model card that is no longer current
            f"this engine serves the LoRA adapters {names}; {request.lora_name!r} was asked for"
        )
    if request.data_parallel_rank not in (None, *range(facts.data_parallel_size)):
        raise limits.invalid(
            "data_parallel_rank", f"below {facts.data_parallel_size}", request.data_parallel_rank
        )


def _check_guided(request: generate.Request, facts: api.EngineFacts) -> None:
    guided = request.sampling_options.guided_decoding
    if guided is None:
        return
    if not facts.supports_guided:
        raise errors.InvalidRequest.of_param(guided.param, "this engine has no guided decoding")
    if not request.eos_token_ids:
        raise limits.invalid(
            "eos_token_ids", "at least one, with which a guided answer can end", ()
        )


def _check_prompt(request: generate.Request, context_length: int) -> None:
    if len(request.token_ids) % blocks.TOKEN_BYTES or not request.token_ids:
        raise errors.InvalidRequest(
            "the prompt must be at least one token, packed as u32;"
            f" got {len(request.token_ids)} bytes",
            param="prompt",
        )
    if request.prompt_len >= context_length:
        raise model_errors.ContextTooLong(
            f"the prompt has {request.prompt_len} tokens; at most {context_length - 1} fit here,"
            f" as prompt and answer share a context of {context_length} tokens",
            param="prompt",
        )


def _check_tokens(request: generate.Request, vocab_size: int) -> None:
    named = {
        "prompt": blocks.unpack(request.token_ids),
        "logit_bias": request.sampling_options.logit_bias,
        "allowed_token_ids": request.sampling_options.allowed_token_ids,
        "stop_token_ids": request.stop_conditions.stop_token_ids,
        "eos_token_ids": request.eos_token_ids,
    }
    if request.thinking is not None:
        named["thinking"] = (*request.thinking.close_ids, *request.thinking.open_ids)
    for param, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
            raise limits.invalid(param, f"token ids from 0 to {vocab_size - 1}", worst)
