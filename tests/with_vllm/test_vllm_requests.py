"""What a request asks of real vLLM, and what comes of it."""

import asyncio
import importlib.util
import json
import re
import warnings

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

from dynamo.base import errors
from dynamo.preprocess import tokenize
from dynamo.protocols import blocks, generate
from dynamo.worker import model_source
from vllm_engine import *  # noqa: F403 (fixtures: one engine for this module)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm.v1.structured_output import backend_xgrammar

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = tuple(range(3, 43))
END = 2  # <|im_end|>
NOTHING = '{"type":"object","properties":{},"additionalProperties":false}'
CALLS = generate.GuidedToolCalls(
    tools=(
        generate.ToolSchema(name="now", parameters=NOTHING),
        generate.ToolSchema(name="here", parameters=NOTHING),
    ),
    begin="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)


async def ask(host, request_id, *, prompt=PROMPT, max_tokens=8, n=1, extra=None, **sampling):
    host.engine.submit(
        generate.Request(
            id=request_id,
            model="m",
            token_ids=blocks.pack(prompt),
            stop_conditions=generate.StopConditions(max_tokens=max_tokens),
            sampling_options=generate.SamplingOptions(n=n, **sampling),
            eos_token_ids=(END,),
            **(extra or {}),
        )
    )
    await host.sink.until(
        lambda: (
            request_id in host.sink.errors
            or all(host.sink.has_ended(request_id, i) for i in range(n))
        )
    )
    if request_id in host.sink.errors:
        raise host.sink.errors[request_id]
    return host.sink.tokens(request_id)


async def guided(host, max_tokens=150, **shape):
    """The text of an answer that is held to this shape."""
    name, wanted = f"guided by {shape}", generate.GuidedDecoding(**shape)
    tokens = await ask(host, name, max_tokens=max_tokens, guided_decoding=wanted, seed=1)
    tokenizer = tokenize.Tokenizer((model_source.built_in() / "tokenizer.json").read_bytes())
    assert host.sink.of(name)[-1].finish_reason == generate.FinishReason.EOS
    return tokenizer.decode(tokens[:-1], skip_special_tokens=False)


async def test_a_seed_repeats_an_answer_and_choices_differ(host):
    await ask(host, "a", seed=7, n=2)
    await ask(host, "b", seed=7, n=2)
    await ask(host, "c", seed=8)

    assert host.sink.tokens("a") == host.sink.tokens("b")
    assert host.sink.tokens("a", 1) == host.sink.tokens("b", 1) != host.sink.tokens("a")
    assert host.sink.tokens("c") != host.sink.tokens("a")


async def test_logit_bias_forces_a_token(host):
    assert await ask(host, "a", logit_bias={1234: 100.0}, temperature=0.0) == [1234] * 8


async def test_small_top_k_and_top_p_are_greedy(host):
    greedy = await ask(host, "greedy", temperature=0.0)

    assert await ask(host, "k", top_k=1, seed=1) == greedy
    assert await ask(host, "p", top_p=0.0, seed=1) == greedy


async def test_a_penalty_prevents_repetition(host):
    forced = {"logit_bias": {1234: 100.0}, "temperature": 0.0}
    tokens = await ask(host, "a", repetition_penalty=1000.0, **forced)

    assert tokens[0] == 1234
    assert tokens.count(1234) == 1


async def test_vllms_refusals_name_the_field(host):
    with pytest.raises(errors.InvalidRequest, match="temperature must be in") as refusal:
        await ask(host, "a", temperature=3.0)

    assert refusal.value.param == "temperature"


PATTERNS = [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(16)]
ENDLESS = {"allOf": [{"allOf": PATTERNS[i : i + 4]} for i in range(0, 16, 4)]}


@pytest.mark.skipif(
    not backend_xgrammar.has_xgrammar_unsupported_json_features(ENDLESS),
    reason="this release of vLLM lets XGrammar compile it, which takes a millisecond",
)
async def test_grammar_without_end_is_refused_while_other_answers_go_on(host):
    refused = asyncio.create_task(guided(host, json=json.dumps(ENDLESS)))
    await asyncio.sleep(0)
    assert await ask(host, "a", max_tokens=8)
    assert not refused.done()

    with pytest.raises(errors.InvalidRequest, match="cannot be followed"):
        await refused


async def test_an_invalid_grammar_is_refused(host):
    with pytest.raises(errors.InvalidRequest):
        await guided(host, grammar="this is none")


async def test_a_thinking_limit_needs_vllms_reasoning_parser(host):
    limit = generate.ThinkingLimit(max_tokens=5, close_ids=(4,))
    with pytest.raises(errors.InvalidRequest, match="reasoning"):
        await ask(host, "a", extra={"thinking": limit})


async def test_an_unknown_adapter_raises_worker_lost(host):
    with pytest.raises(errors.WorkerLost, match="'poet' was asked for"):
        await ask(host, "a", extra={"lora_name": "poet"})


async def test_an_answer_follows_a_schema(host):
    schema = '{"type":"object","properties":{"a":{"enum":[true,12]}},"required":["a"],"additionalProperties":false}'

    assert json.loads(await guided(host, json=schema))["a"] in (True, 12)


async def test_an_answer_follows_a_regular_expression_a_choice_and_a_grammar(host):
    assert re.fullmatch("[0-9]{3}", await guided(host, regex="[0-9]{3}"))
    assert await guided(host, choice=("red", "blue")) in ("red", "blue")
    assert await guided(host, grammar='root ::= "yes" | "no"') in ("yes", "no")


async def test_tool_calls_can_be_forced(host):
    text = await guided(host, calls=CALLS)
    said = text.removeprefix(CALLS.begin).removesuffix(CALLS.end)

    assert text == CALLS.begin + said + CALLS.end
    assert json.loads(said)["name"] in ("now", "here")


async def test_begun_thoughts_may_precede_a_choice(host):
    thoughts = generate.GuidedReasoning(closes=("t",))
    text = await guided(host, choice=("red", "blue"), thoughts=thoughts, max_tokens=400)

    assert re.search("t(red|blue)$", text)


async def test_a_guided_answer_cannot_be_resumed(host):
    with pytest.raises(errors.InvalidRequest, match="another worker began"):
        await ask(
            host,
            "a",
            extra={"num_resumed": 2},
            guided_decoding=generate.GuidedDecoding(choice=("red",), param="guided_choice"),
        )
