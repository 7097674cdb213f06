"""Translation that several libraries share: options of one choice, guided decoding, finish reasons, logprobs, load.

Guided decoding is translated to vLLM's structured outputs; the other adapters rename the fields. A JSON schema, regex,
choice or grammar alone has a field of its own. Thoughts before an answer, tool calls, and alternatives of two are
composed as a structural tag of XGrammar (`xgrammar.structural_tag`), the default backend of all three libraries.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import generate, load

MAX_SEED = 2**63
_EXCLUSIVE_BIAS = 100.0  # of a token: no other comes
_RESUMED_STEP = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: far from every choice's seed
TOKENS_ONLY = generate.OutputOptions()  # an output reports its tokens and nothing else
# token id → a library's logprob, with the fields `logprob` and `rank`
Alternatives = Mapping[int, Any]


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
    OptionRow(
        lambda request, _: [*request.sampling_options.allowed_token_ids] or None,
        "allowed_token_ids", None, None,
    ),
    OptionRow(lambda request, _: request.stop_conditions.max_tokens, "max_tokens", None, None),
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


def biases(options: generate.SamplingOptions) -> dict[int, float]:
    """Return the biases for a library without allowed tokens: these get so much more that no other token comes."""
    if not options.allowed_token_ids:
        return options.logit_bias
    allowed = {token: options.logit_bias.get(token, 0.0) for token in options.allowed_token_ids}
    shift = _EXCLUSIVE_BIAS - min(allowed.values())
    return {token: bias + shift for token, bias in allowed.items()}


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
        raise errors.InvalidRequest.of_param(
            guided.param, f"{library} cannot resume a guided answer that another worker began"
        )


def refuse_param(library: str, param: str, reason: str, *, is_used: bool) -> None:
    """Raise InvalidRequest that names the parameter, if the request uses it and the library cannot honour it."""
    if is_used:
        raise errors.InvalidRequest.of_param(param, f"{library} {reason}")


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
    last_passes: tuple[load.ForwardPass, ...] = ()  # if the library tells its times

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
            last_passes=self.last_passes,
        )


class GuidedSupport(NamedTuple):
    """The guided decoding of a library, as it was started."""

    backend: str = "auto"  # what compiles grammars, as the library's flags name it
    # the library finds the end of thoughts itself, and guides only the answer
    has_reasoner: bool = False
    has_choice: bool = True  # there is a field for a choice of texts


def structured_output_fields(
    guided: generate.GuidedDecoding, support: GuidedSupport
) -> dict[str, Any]:
    """Return one of the fields json, regex, choice, grammar and structural_tag; others may be None.

    Raises InvalidRequest.
    """
    if guided.backend not in (None, "auto", support.backend):
        raise errors.InvalidRequest.of_param(
            "guided_decoding_backend",
            f"expected auto or {support.backend}, with which the engine was started,"
            f" got {guided.backend!r}",
        )
    thoughts = None if support.has_reasoner else guided.thoughts
    is_composed = guided.choice is not None and not support.has_choice
    if thoughts is not None or guided.calls is not None or is_composed:
        tag = {"type": "structural_tag", "format": _tag_format(guided, thoughts)}
        return {"structural_tag": json.dumps(tag)}
    return {
        "json": guided.json,
        "regex": guided.regex,
        "choice": list(guided.choice) if guided.choice is not None else None,
        "grammar": guided.grammar,
    }


def _tag_format(
    guided: generate.GuidedDecoding, thoughts: generate.GuidedReasoning | None
) -> dict[str, Any]:
    formats = [_calls_format(guided, guided.calls)] if guided.calls is not None else []
    if any((guided.json, guided.regex, guided.choice, guided.grammar)):
        formats.append(_text_format(guided))
    answer = _any_of(formats)
    if thoughts is None:
        return answer
    with_thoughts = [
        {
            "type": "sequence",
            "elements": [_tag(begin, {"type": "any_text"}, list(thoughts.closes)), answer],
        }
        for begin in thoughts.opens or ("",)
    ]
    return _any_of([*with_thoughts, answer] if thoughts.opens else with_thoughts)


def _text_format(guided: generate.GuidedDecoding) -> dict[str, Any]:
    if guided.json is not None:
        return _schema_format(guided, guided.json)
    if guided.regex is not None:
        return {"type": "regex", "pattern": guided.regex}
    if guided.choice is not None:
        return _any_of([{"type": "const_string", "value": text} for text in guided.choice])
    return {"type": "grammar", "grammar": guided.grammar}


def _calls_format(
    guided: generate.GuidedDecoding, calls: generate.GuidedToolCalls
) -> dict[str, Any]:
    """Return the format of tool calls. XGrammar can limit their number only to one, or not at all."""
    tool_tags = [
        _tag(
            f'{{"name": {json.dumps(tool.name)}, "arguments": ',
            _schema_format(guided, tool.parameters),
            "}",
        )
        for tool in calls.tools
    ]
    separated = {
        "type": "tags_with_separator",
        "tags": tool_tags,
        "separator": calls.between,
        "at_least_one": True,
        "stop_after_first": calls.max_calls == 1,
    }
    return _tag(calls.begin, separated, calls.end)


def _tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema_format(guided: generate.GuidedDecoding, text: str) -> dict[str, Any]:
    try:
        return {"type": "json_schema", "json_schema": json.loads(text)}
    except ValueError as error:
        raise errors.InvalidRequest.of_param(
            guided.param, f"expected a JSON schema: {error}"
        ) from error


def _any_of(formats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}
