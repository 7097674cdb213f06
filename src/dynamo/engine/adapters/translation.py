"""Translation that several libraries share: options of one choice, finish reasons, logprobs, and load of a rank."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import generate, load

MAX_SEED = 2**63
_RESUMED_STEP = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: far from every choice's seed
TOKENS_ONLY = generate.OutputOptions()  # an output reports its tokens and nothing else
Alternatives = Mapping[
    int, Any
]  # token id → a library's logprob, with the fields `logprob` and `rank`


class OptionRow(NamedTuple):
    """A sampling option: its value for one choice, and its name in each library; None where the adapter sets it."""

    value: Callable[[generate.Request, int], Any]
    vllm: str | None
    sglang: str | None
    trtllm: str | None


def _plain(name: str) -> OptionRow:
    """Return the row of an option that all libraries understand as we do, under our name."""
    return OptionRow(lambda request, _: getattr(request.sampling_options, name), name, name, name)


_OPTIONS = (
    OptionRow(
        lambda request, _: (
            0.0
            if is_greedy(request.sampling_options)
            else request.sampling_options.temperature
        ),
        "temperature", "temperature", "temperature",
    ),
    OptionRow(lambda request, _: request.sampling_options.top_p or 1.0, "top_p", "top_p", "top_p"),
    OptionRow(lambda request, _: request.sampling_options.top_k, "top_k", None, "top_k"),
    _plain("min_p"),
    _plain("repetition_penalty"),
    _plain("presence_penalty"),
    _plain("frequency_penalty"),
    OptionRow(lambda request, index: choice_seed(request, index), "seed", "sampling_seed", "seed"),
    OptionRow(lambda request, _: request.sampling_options.logit_bias or None, "logit_bias", None, None),
    OptionRow(lambda request, _: request.stop_conditions.max_tokens, "max_tokens", "max_new_tokens", None),
    OptionRow(lambda request, _: request.stop_conditions.min_tokens, "min_tokens", "min_new_tokens", None),
    OptionRow(lambda request, _: stop_token_ids(request), "stop_token_ids", "stop_token_ids", None),
)  # fmt: skip


def sampling_fields(
    request: generate.Request, index: int, library: Literal["vllm", "sglang", "trtllm"]
) -> dict[str, Any]:
    """Return the sampling options of choice `index` under the names of this library."""
    named = ((getattr(row, library), row.value) for row in _OPTIONS)
    return {name: value(request, index) for name, value in named if name is not None}


def is_greedy(options: generate.SamplingOptions) -> bool:
    """Return whether these options always choose the likeliest token."""
    return options.temperature == 0 or options.top_p == 0


def stop_token_ids(request: generate.Request) -> list[int]:
    """Return all tokens that end an answer: the request's stop tokens, and the model's end tokens."""
    stop = request.stop_conditions
    return [*stop.stop_token_ids, *(() if stop.ignore_eos else request.eos_token_ids)]


def choice_seed(request: generate.Request, index: int) -> int | None:
    """Return the seed of choice `index`, or None if the request has none.

    A resumed answer gets another seed: with the same one it would draw again what it has drawn before.
    """
    seed = request.sampling_options.seed
    if seed is None:
        return None
    return (seed + request.first_choice + index + request.num_resumed * _RESUMED_STEP) % MAX_SEED


def stop_finish(
    request: generate.Request, stop_reason: int | str | None
) -> tuple[generate.FinishReason, int | str | None]:
    """Return finish reason and stop reason of a choice that a stop token ended.

    Libraries do not distinguish end tokens from stop tokens: the request does.
    """
    if stop_reason in (None, *request.eos_token_ids):
        return generate.FinishReason.EOS, None
    return generate.FinishReason.STOP, stop_reason


def refuse_resumed_guided(request: generate.Request, library: str) -> None:
    """Raise InvalidRequest for a guided answer that another worker began: no library accepts a grammar's state."""
    guided = request.sampling_options.guided_decoding
    if guided is not None and request.num_resumed:
        raise errors.InvalidRequest(
            f"{guided.param}: {library} cannot resume a guided answer that another worker began",
            param=guided.param,
        )


def refuse_param(library: str, param: str, reason: str, *, is_used: bool) -> None:
    """Raise InvalidRequest that names the parameter, if the request uses it and the library cannot honour it."""
    if is_used:
        raise errors.InvalidRequest(f"{param}: {library} {reason}", param=param)


def convert_logprobs(
    steps: Iterable[Alternatives] | None, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    """Convert the logprobs of consecutive tokens; the chosen token is the first entry of each step.

    Returns None if there are none, or if the request asked for none (`num_top` is None).
    """
    if steps is None or num_top is None:
        return None
    return tuple(token_logprobs(next(iter(step.values())), step, num_top) for step in steps)


def token_logprobs(chosen: Any, alternatives: Alternatives, num_top: int) -> generate.TokenLogprobs:
    """Convert the logprob of a chosen token and of the `num_top` likeliest, best first."""
    ranked = sorted(alternatives.items(), key=lambda item: item[1].rank)[:num_top]
    top = tuple(generate.TopLogprob(token, entry.logprob) for token, entry in ranked)
    return generate.TokenLogprobs(chosen.logprob, top)


@dataclass(slots=True, kw_only=True)
class RankLoad:
    """The load of one data-parallel rank as its library reported it last."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # that running requests hold
    hit_rate: float = 0.0  # cached prompt tokens / prompt tokens, since the start

    def metrics(
        self, facts: api.EngineFacts, rank: int, *, num_prefill_tokens: int, is_idle: bool
    ) -> load.ForwardPassMetrics:
        """Convert to the metrics that routers read.

        Libraries report nothing when their last request is aborted: with `is_idle` the last report is outdated.
        """
        return load.ForwardPassMetrics(
            worker_stats=load.WorkerStats(
                request_active_slots=0 if is_idle else self.num_running,
                request_total_slots=facts.max_num_seqs,
                num_requests_waiting=0 if is_idle else self.num_waiting,
                active_prefill_tokens=num_prefill_tokens,
                data_parallel_rank=rank,
            ),
            kv_stats=load.KvStats(
                kv_active_blocks=0 if is_idle else self.num_blocks,
                kv_total_blocks=facts.total_kv_blocks,
                gpu_prefix_cache_hit_rate=self.hit_rate,
            ),
        )
