"""An answer that another worker resumes equals the uninterrupted one, wherever it was cut."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.frontend import migration
from dynamo.protocols import blocks, generate
from guided import Storyteller

QUESTION = "Tell me a story about a cat"
LIMITS = generate.StopConditions(max_tokens=40)
WAYS = {
    "greedy": {"temperature": 0.0},
    "from all": {"temperature": 1.2, "seed": 7},
    "from few": {"temperature": 1.0, "seed": 8, "top_k": 20},
    "from the likeliest": {"temperature": 1.0, "seed": 9, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "repetition": {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.3},
}
SHAPE = generate.GuidedDecoding(
    json='{"type":"array","items":{"enum":["cat","dog"]},"minItems":6,"maxItems":6}'
)


@pytest.fixture(scope="module")
def teller():
    return Storyteller()


def answer(teller, request):
    teller.submit(request)
    return list(teller.answers()[request.id].token_ids)


def resumed(teller, request, whole, cut, choice=0):
    """The whole answer, of which a second worker gave what follows the cut."""
    (rest,) = migration.remaining_requests(request, {choice: blocks.pack(whole[:cut])}).values()
    return whole[:cut] + answer(teller, rest)


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_answer_resumed_at_any_token_is_unchanged(teller, way, data):
    request = teller.request("a", QUESTION, stop=LIMITS, **WAYS[way])
    whole = answer(teller, request)
    cut = data.draw(st.integers(0, len(whole) - 1))

    assert resumed(teller, request, whole, cut) == whole


def test_resumed_choice_continues_its_random_sequence(teller):
    together = teller.request("n", QUESTION, stop=LIMITS, n=2, temperature=1.0, seed=3)
    alone = msgspec.structs.replace(
        together, sampling_options=msgspec.structs.replace(together.sampling_options, n=1)
    )
    second = answer(teller, msgspec.structs.replace(alone, first_choice=1))

    assert second != answer(teller, alone)
    assert resumed(teller, together, second, 11, choice=1) == second


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_resumed_guided_answer_continues_the_grammar(teller, data):
    request = teller.request("g", QUESTION, SHAPE, temperature=1.0, seed=5)
    whole = answer(teller, request)
    cut = data.draw(st.integers(0, len(whole) - 1))

    assert resumed(teller, request, whole, cut) == whole


@pytest.mark.parametrize("cut", [0, 1, 5, 7])
def test_resumed_reasoning_keeps_the_thinking_budget(teller, cut):
    limit = generate.ThinkingLimit(max_tokens=6, close_ids=(9,), is_open=True)
    request = teller.request("t", QUESTION, stop=LIMITS, temperature=0.0)
    request = msgspec.structs.replace(request, thinking=limit)
    whole = answer(teller, request)

    assert whole[6] == 9
    assert resumed(teller, request, whole, cut) == whole
