"""Translation of one choice between our request and output and those of vLLM; the load from its scheduler's statistics.

Each choice is a request of its own to vLLM, which would make the same of `n`: so one can be aborted alone, and a greedy
request may have several. Their prompt is computed once, as they share a prefix.

The end tokens are those of the request, not those that vLLM finds in the model's files: vLLM ignores its own and stops
at ours. An option that vLLM cannot honour is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import translation
from dynamo.engine.adapters.vllm import connectors
from dynamo.engine.adapters.vllm.tier_plan import CACHE_HINT, IS_TRACED
from dynamo.kvbm import tier_report
from dynamo.observability import tracing
from dynamo.protocols import generate, load

# Of one request. vLLM itself does not look: with more, the sampler of its GPU ends the engine process (vllm #55164).
_MAX_BIASES, _MAX_END_IDS = 1024, 128
_FINISH_REASONS = {
    "repetition": generate.FinishReason.STOP,
    "length": generate.FinishReason.LENGTH,
}


def sampling_fields(
    request: generate.Request, index: int, support: translation.GuidedSupport
) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams for choice `index`. Raises InvalidRequest.

    `structured_outputs` is itself a map of fields. Prompt logprobs and the KV transfer are the first choice's only.
    """
    report, is_first = request.output_options, index == 0
    transfer_params = connectors.encode_params(request.kv_transfer_params) if is_first else None
    guided, hint = request.sampling_options.guided_decoding, request.cache_hint
    is_traced = is_first and tracing.stage_record.get() is not None
    if guided is not None:
        translation.refuse_resumed_guided(request, "vLLM")
    _refuse_too_many(request)
    return {
        **translation.sampling_fields(request, index, "vllm"),
        "structured_outputs": guided and translation.structured_output_fields(guided, support),
        "thinking_token_budget": request.thinking.max_tokens if request.thinking else None,
        "ignore_eos": True,
        "logprobs": report.logprobs,
        "prompt_logprobs": report.prompt_logprobs if is_first else None,
        "detokenize": False,
        "skip_clone": True,
        "extra_args": {
            **({"kv_transfer_params": transfer_params} if transfer_params else {}),
            **({CACHE_HINT: msgspec.to_builtins(hint)} if hint else {}),
            **({IS_TRACED: True} if is_traced else {}),
        }
        or None,
    }


def _refuse_too_many(request: generate.Request) -> None:
    """Raise InvalidRequest for so many biases or end tokens that vLLM's engine would end, with all its requests."""
    stop = request.stop_conditions
    # vLLM counts the model's own in any case
    end_ids = {*stop.stop_token_ids, *request.eos_token_ids}
    translation.refuse_param(
        "vLLM", "logit_bias", f"takes at most {_MAX_BIASES}, those of bad_words included",
        is_used=len(request.sampling_options.logit_bias) > _MAX_BIASES,
    )  # fmt: skip
    translation.refuse_param(
        "vLLM", "stop_token_ids", f"takes at most {_MAX_END_IDS} with min_tokens, the model's own included",
        is_used=stop.min_tokens > 0 and len(end_ids) > _MAX_END_IDS,
    )  # fmt: skip


def max_top_logprobs(max_logprobs: int, vocab_size: int) -> int:
    """Return the most alternatives of a token, of which `--max-logprobs -1` allows all."""
    return vocab_size if max_logprobs == -1 else max_logprobs


def translate_output(
    result: Any, index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """Convert vLLM's RequestOutput of choice `index`; most hold a token and nothing else.

    `is_first` marks the request's first output. Raises EngineFailed if vLLM gave the request up.
    """
    completion, report = result.outputs[0], request.output_options
    tokens = tuple(completion.token_ids)
    if completion.finish_reason is None and not is_first and report == translation.TOKENS_ONLY:
        return generate.Output(tokens, None, index)
    finish_reason, stop_reason = _finish(completion, request)
    params = result.kv_transfer_params or {}  # with the last output
    loaded = params.get(connectors.TIER_TOKENS)
    if index == 0 and (record := tracing.stage_record.get()) is not None:
        _record_reads(record, params)
    prompt_steps = [step for step in result.prompt_logprobs or () if step is not None]
    return generate.Output(
        tokens,
        finish_reason,
        index,
        logprobs=translation.convert_logprobs(completion.logprobs, report.logprobs),
        cached_tokens=(result.num_cached_tokens or 0) if is_first else None,
        prompt_len=len(result.prompt_token_ids) if is_first and request.images else None,
        stop_reason=stop_reason,
        kv_transfer_params=connectors.decode_params(result.kv_transfer_params),
        tier_tokens=tuple(sorted(loaded.items())) if loaded and index == 0 else None,
        prompt_logprobs=(  # the first token, which nothing predicts, has None
            translation.convert_logprobs(prompt_steps, report.prompt_logprobs)
            if result.prompt_logprobs
            else None
        ),
    )


def _record_reads(record: tracing.StageRecord, params: Mapping[str, Any]) -> None:
    """Add what our connector says of the tiers to the spans of the call."""
    for tier, num_tokens in params.get(connectors.TIER_TOKENS, {}).items():
        record.attributes[f"cached_tokens.{tier}"] = num_tokens
    for fields in params.get(connectors.TIER_READS, ()):
        read = msgspec.convert(fields, tier_report.TierRead)
        record.stages.append(
            tracing.Stage("read_tier", read.began_at, read.ended_at, read.attributes)
        )


def _finish(
    completion: Any, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    if completion.finish_reason is None:
        return None, None
    if completion.finish_reason == "stop":
        return translation.stop_finish(request, completion.stop_reason)
    if completion.finish_reason not in _FINISH_REASONS:
        raise errors.EngineFailed(f"vLLM gave the request up: {completion.finish_reason}")
    return _FINISH_REASONS[completion.finish_reason], completion.stop_reason


class _VllmPass(NamedTuple):
    """A forward pass of a rank. It lasted since the one before, in which requests ran."""

    num_prompt_tokens: int  # of the prompts that it completed
    cache_usage: float  # while it continued answers; 0: it continued none
    wall_s: float


class _VllmPasses:
    """The last pass of a rank that completed prompts, and the last that completed none."""

    def __init__(self) -> None:
        self._latest: dict[bool, _VllmPass] = {}
        self._ended_at = 0.0  # seconds since 1970
        self._is_busy = False  # requests run since then

    def record(self, stats: Any, iteration: Any) -> None:
        """Record a pass by vLLM's statistics."""
        num_prompt_tokens = iteration.num_prompt_tokens
        num_continued = iteration.num_generation_tokens - len(iteration.time_to_first_tokens_iter)
        usage = stats.kv_cache_usage if num_continued > 0 else 0.0
        if self._is_busy:
            wall_s = iteration.iteration_timestamp - self._ended_at
            self._latest[num_prompt_tokens > 0] = _VllmPass(num_prompt_tokens, usage, wall_s)
        self._ended_at = iteration.iteration_timestamp
        self._is_busy = stats.num_running_reqs > 0

    def describe(self, facts: api.EngineFacts) -> tuple[load.ForwardPass, ...]:
        """Return the passes as workers report them, without one that ends a prompt of several passes."""
        return tuple(
            load.ForwardPass(
                num_prompt_tokens=each.num_prompt_tokens,
                num_kv_tokens=round(each.cache_usage * facts.total_kv_blocks * facts.kv_block_size),
                wall_s=each.wall_s,
            )
            for each in self._latest.values()
            if each.num_prompt_tokens <= facts.max_num_batched_tokens
        )


class VllmLoad:
    """The load of all data-parallel ranks, from the statistics that vLLM reports after each step."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [translation.RankLoad() for _ in range(num_ranks)]
        self._cache_usage = [0.0] * num_ranks  # 0..1
        self._num_queries = [0] * num_ranks  # prompt tokens since the start
        self._num_hits = [0] * num_ranks
        self._passes = [_VllmPasses() for _ in range(num_ranks)]
        self.tier_report: tier_report.TierReport | None = None  # of the rank that reported last

    def record(self, rank: int, stats: Any, iteration: Any = None) -> None:
        """Record vLLM's SchedulerStats, and IterationStats, of a step of this rank."""
        if iteration is not None:
            self._passes[rank].record(stats, iteration)
        self._cache_usage[rank] = stats.kv_cache_usage
        report = connectors.find_tier_report(stats)
        if report is not None:
            self.tier_report = msgspec.convert(report, tier_report.TierReport)
        self._num_queries[rank] += stats.prefix_cache_stats.queries
        self._num_hits[rank] += stats.prefix_cache_stats.hits
        self._ranks[rank] = translation.RankLoad(
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            hit_rate=self._num_hits[rank] / max(1, self._num_queries[rank]),
        )

    def metrics(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """Return the load of each rank as of its last step; see `translation.RankLoad.metrics`."""
        num_tokens = num_prefill_tokens // len(self._ranks)
        for rank, usage, passes in zip(self._ranks, self._cache_usage, self._passes, strict=True):
            rank.num_blocks = round(usage * facts.total_kv_blocks)
            rank.last_passes = passes.describe(facts)
        return [
            rank.metrics(facts, number, num_prefill_tokens=num_tokens, is_idle=is_idle)
            for number, rank in enumerate(self._ranks)
        ]
