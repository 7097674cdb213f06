"""Grammars that vLLM would check or compile for ever are refused, by a process that is ended."""

import importlib.util
import json
import warnings

import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import vllm_models
from dynamo.base import errors
from dynamo.engine.adapters.vllm import grammars
from dynamo.protocols import generate, limits
from dynamo.worker import engines
from vllm_engine import ENVIRONMENT, FLAGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm.v1.structured_output import backend_xgrammar

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
PATTERNS = {f"p{i}": {"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(16)}
REFERENCES = [{"$ref": f"#/$defs/{name}"} for name in PATTERNS]
SPLIT = [{"allOf": list(PATTERNS.values())[i : i + 4]} for i in range(0, 16, 4)]


@pytest_asyncio.fixture(loop_scope="module")
async def grammar_trials(tmp_path_factory):
    directory = vllm_models.make(tmp_path_factory.mktemp("qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (engines.kind_of("vllm").environment | ENVIRONMENT).items():
            patch.setenv(name, value)  # a worker's
        checker = grammars.make_trials(directory, FLAGS.split())
        yield checker
        await checker.close()


def schema(content):
    guided = generate.GuidedDecoding(json=json.dumps(content), param="response_format")
    limits.check_guided(guided)
    return guided


@pytest.mark.skipif(
    not backend_xgrammar.has_xgrammar_unsupported_json_features({"allOf": SPLIT}),
    reason="this release of vLLM lets XGrammar compile them, which takes a millisecond",
)
@pytest.mark.parametrize(
    "content",
    [
        {"allOf": SPLIT},
        {"$defs": PATTERNS, "allOf": REFERENCES},
    ],
    ids=["nested patterns", "patterns by reference"],
)
async def test_grammar_without_end_is_refused_before_vllm_has_it(grammar_trials, content):
    with pytest.raises(errors.InvalidRequest, match=r"10 s of processor time|1024 MiB of memory"):
        await grammar_trials.check(schema(content))

    await grammar_trials.check(schema({"type": "object", "properties": {"a": {"type": "string"}}}))


async def test_invalid_grammar_is_refused_with_vllms_words(grammar_trials):
    with pytest.raises(errors.InvalidRequest, match="Invalid grammar specification"):
        await grammar_trials.check(generate.GuidedDecoding(grammar="this is none"))
