"""Translation between our requests and outputs and llama.cpp's: options, grammars, results, and withheld tokens.

llama.cpp takes one map of options for each completion. It streams text, and with `verbose` the tokens beside it; but of
a character that several tokens make, it withholds the tokens until the character is whole, and then names only the last
of them. The count of tokens shows that, and `recover` finds the others by their bytes.

An option that llama.cpp cannot honour is refused by name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynamo.engine.adapters import translation
from dynamo.protocols import generate

_NAME = "llama.cpp"
LARK = "%llguidance {}"  # begins a grammar for llguidance; others are in GBNF
_NEVER = False  # as the bias of a token
_MAX_SEED = 2**32 - 2  # 2**32 - 1 asks for a random one
# of a recovered token, which came without: what OpenAI gives to the unlikely
_UNKNOWN_LOGPROB = -9999.0
# The temperature comes before min_p and top_p, as with vLLM and unlike llama.cpp's own order. The top k are the same
# wherever they are cut; cut first, the other samplers do not go through a whole vocabulary, which took 4 ms a token.
_SAMPLERS = ("penalties", "top_k", "temperature", "min_p", "top_p")
# A name that `compose_grammar` gives to a rule, or what is no name in Lark: text, a token, a comment, a regex.
_OWN_NAME = re.compile(
    r'"(?:\\.|[^"\\])*"|<[^<>\s]+>|(?://|\#).*|/(?:\\.|[^/\\\n])+/'
    r"|\b(start|answer|answer_\d+|calls?|call_\d+|tool_\d+|thinking|TEXT|BLANKS)\b"
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


TokenBytes = tuple[Sequence[bytes], Mapping[bytes, int]]
"""The bytes of each token by its id, and the ids by the bytes."""


class CompletionPart(NamedTuple):
    """Some tokens of a choice as they came; `finish` and `stop_token` end it."""

    tokens: tuple[int, ...]
    num_cached: int  # prompt tokens that were in the cache
    logprobs: tuple[generate.TokenLogprobs, ...] | None = None
    finish: generate.FinishReason | None = None
    stop_token: int | None = None


def completion_options(
    request: generate.Request, index: int, context_length: int
) -> dict[str, Any]:
    """Return llama.cpp's options for choice `index`, without prompt and slot. Raises InvalidRequest."""
    sampling, stop = request.sampling_options, request.stop_conditions
    refuse = translation.refuse_param
    penalty_reason = "counts the tokens of the prompt, too: use repetition_penalty"
    refuse(_NAME, "presence_penalty", penalty_reason, is_used=bool(sampling.presence_penalty))
    refuse(_NAME, "frequency_penalty", penalty_reason, is_used=bool(sampling.frequency_penalty))
    refuse(_NAME, "prompt_logprobs", "reports none for a prompt",
           is_used=request.output_options.prompt_logprobs is not None)  # fmt: skip
    refuse(_NAME, "nvext.max_thinking_tokens", "has no limit for thoughts here",
           is_used=request.thinking is not None)  # fmt: skip
    refuse(_NAME, "kv_transfer_params", "moves no blocks between workers",
           is_used=request.kv_transfer_params is not None)  # fmt: skip
    room = context_length - request.prompt_len
    is_greedy = translation.is_greedy(sampling)
    seed = translation.choice_seed(request, index)
    options: dict[str, Any] = {
        "n_predict": min(stop.max_tokens or room, room),
        "temperature": 0.0 if is_greedy else sampling.temperature,
        "top_k": 1 if is_greedy else sampling.top_k,
        "top_p": sampling.top_p or 1.0,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": context_length,
        "samplers": list(_SAMPLERS),
        "logit_bias": [[token, bias] for token, bias in translation.biases(sampling).items()],
        "ignore_eos": stop.ignore_eos,
        "stream": True,
        "verbose": True,
        "return_tokens": True,
        "return_progress": True,  # so that a long prompt can be aborted
    }
    if seed is not None:
        options["seed"] = seed % _MAX_SEED
    if request.output_options.logprobs is not None:
        options["n_probs"] = max(1, request.output_options.logprobs)
    if sampling.guided_decoding is not None:
        translation.refuse_resumed_guided(request, _NAME)
        refuse(_NAME, "min_tokens", "cannot hold a guided answer to it: its grammar would begin anew after so many",
               is_used=bool(stop.min_tokens))  # fmt: skip
        options["grammar"] = compose_grammar(sampling.guided_decoding)
    return options


def without_end(options: Mapping[str, Any], request: generate.Request) -> dict[str, Any]:
    """Return the options for the first `min_tokens` tokens: none of them may end the answer."""
    stop = request.stop_conditions
    ends = [[token, _NEVER] for token in (*stop.stop_token_ids, *request.eos_token_ids)]
    return {
        **options,
        "n_predict": min(stop.min_tokens, options["n_predict"]),
        "logit_bias": [*options["logit_bias"], *ends],
        "ignore_eos": True,
    }


def part_logprobs(
    result: Mapping[str, Any], num_recovered: int, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    """Return the logprobs of a result's tokens, of which the first `num_recovered` came without any."""
    if num_top is None:
        return None
    entries = (result["choices"][0]["logprobs"] or {"content": ()})["content"]
    unknown = generate.TokenLogprobs(_UNKNOWN_LOGPROB, ())
    return (unknown,) * num_recovered + tuple(
        generate.TokenLogprobs(
            entry["logprob"],
            tuple(
                generate.TopLogprob(top["id"], top["logprob"])
                for top in entry["top_logprobs"][:num_top]
            ),
        )
        for entry in entries
    )


def translate_output(part: CompletionPart, index: int, *, is_first: bool) -> generate.Output:
    """Convert a part of choice `index`; `is_first` marks the request's first one."""
    return generate.Output(
        part.tokens,
        part.finish,
        index,
        logprobs=part.logprobs,
        cached_tokens=part.num_cached if is_first else None,
        stop_reason=part.stop_token,
    )


def recover(
    text: str, last_token: int, num_missing: int, token_bytes: TokenBytes
) -> tuple[int, ...] | None:
    """Return the `num_missing` tokens before `last_token` that make this text with it.

    Of several possibilities it is the one with the longest tokens first. None if there is none: llama.cpp has replaced
    bytes that are no text.
    """
    # a special token has no text here, and may lie behind the vocabulary of a tokenizer.json beside the file
    pieces, ids = token_bytes
    whole, end = text.encode(), pieces[last_token] if last_token < len(pieces) else b""
    if not whole.endswith(end):
        return None

    def split(rest: bytes, num_tokens: int) -> tuple[int, ...] | None:
        if not num_tokens:
            return None if rest else ()
        for length in range(len(rest) - num_tokens + 1, 0, -1):
            token = ids.get(rest[:length])
            if token is not None and (others := split(rest[length:], num_tokens - 1)) is not None:
                return (token, *others)
        return None

    return split(whole[: len(whole) - len(end)], num_missing)


def token_bytes(tokenizer: Mapping[str, Any]) -> TokenBytes:
    """Return the bytes of the tokens of a decoded tokenizer.json. It takes a tenth of a second."""
    is_byte_level = (tokenizer.get("decoder") or {}).get("type") == "ByteLevel"
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    added = {token["id"] for token in tokenizer.get("added_tokens") or ()}
    vocabulary: Any = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of the kind Unigram: texts and scores
        vocabulary = {text: token for token, (text, _) in enumerate(vocabulary)}
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for text, token in vocabulary.items():
        if token in added:
            continue
        if is_byte_level:
            pieces[token] = bytes(letters[letter] for letter in text if letter in letters)
        elif byte := _BYTE_TOKEN.fullmatch(text):
            pieces[token] = bytes((int(byte[1], 16),))
        else:
            pieces[token] = text.replace("▁", " ").encode()
    return pieces, {piece: token for token, piece in enumerate(pieces) if piece}


def compose_grammar(guided: generate.GuidedDecoding) -> str:
    """Return the grammar of a guided answer: Lark for llguidance, which the wheel has built in, or the client's GBNF.

    Raises InvalidRequest.
    """
    refuse = translation.refuse_param
    refuse(_NAME, "guided_decoding_backend", "was built with llguidance",
           is_used=guided.backend not in (None, "auto", "guidance", "llguidance"))  # fmt: skip
    if guided.grammar is not None and "::=" in guided.grammar:
        refuse(_NAME, guided.param, "takes a grammar in GBNF alone, without thoughts or tool calls: write it in Lark",
               is_used=guided.thoughts is not None or guided.calls is not None)  # fmt: skip
        return guided.grammar
    rules, answers = [], []
    if guided.json is not None:
        answers.append(_json_rule(guided.json))
    elif guided.regex is not None:
        regex = re.sub(r"(?s)\\.|/", lambda found: found[0].rjust(2, "\\"), guided.regex)
        answers.append(f"/{regex}/")
    elif guided.choice is not None:
        answers += map(_literal, guided.choice)
    elif guided.grammar is not None:
        rules.append(_OWN_NAME.sub(lambda found: found[0] + "_" * bool(found[1]), guided.grammar))
        answers.append("start_")
    if guided.calls is not None:
        answers.append("calls")
        rules += _call_rules(guided.calls)
    start = "answer"
    if guided.thoughts is not None:
        opens, closes = (
            " | ".join(map(_literal, marks))
            for marks in (guided.thoughts.opens, guided.thoughts.closes)
        )
        start = f"(({opens}) thinking BLANKS)? answer" if opens else "thinking BLANKS answer"
        rules += [
            f"thinking[lazy]: TEXT ({closes})",
            r"TEXT: /(.|\n)*/",
            r"BLANKS: /[ \t\r\n]{0,4}/",
        ]
    if len(answers) > 1:  # `%json` stands alone in a rule
        rules += [f"answer_{i}: {text}" for i, text in enumerate(answers)]
        answers = [f"answer_{i}" for i in range(len(answers))]
    return "\n".join((LARK, f"start: {start}", f"answer: {' | '.join(answers)}", *rules))


def _call_rules(calls: generate.GuidedToolCalls) -> list[str]:
    """Return the rule `calls`, and those to which it refers."""
    begin, between, end = map(_literal, (calls.begin, calls.between, calls.end))
    more = f"({between} call){{0,{calls.max_calls - 1}}}" if calls.max_calls > 1 else ""
    heads = [f'{{"name": {_literal(tool.name)}, "arguments": ' for tool in calls.tools]
    return [
        f"calls: {begin} call {more} {end}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(heads))),
        *(f"call_{i}: {_literal(head)} tool_{i} {_literal('}')}" for i, head in enumerate(heads)),
        *(f"tool_{i}: {_json_rule(tool.parameters)}" for i, tool in enumerate(calls.tools)),
    ]


def _json_rule(schema: str) -> str:
    """Return what stands for JSON of a schema, without white space: a small model may write it without end."""
    fields = json.loads(schema)
    if isinstance(fields, dict):
        fields["x-guidance"] = {"whitespace_flexible": False}
    return f"%json {json.dumps(fields)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
