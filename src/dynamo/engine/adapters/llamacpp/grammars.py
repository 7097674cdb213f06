"""Grammars for llama.cpp: each new one is tried by llguidance in a process that can be ended (`engine.trials`).

llama.cpp has llguidance built in, which compiles without an end if a grammar makes it. Where llguidance refuses one,
llama.cpp only logs that, and the answer goes on without a grammar. One in GBNF is llama.cpp's own, which refuses it.
"""

import llguidance

from dynamo.engine import trials
from dynamo.engine.adapters.llamacpp import translation
from dynamo.protocols import generate

LIMITS = trials.TrialLimits(
    cpu_s=2,  # an ordinary grammar takes a thousandth of it
    memory=2**29,
    wall_s=300,
)


def make_trials() -> trials.GrammarTrials:
    return trials.GrammarTrials(__name__, (), LIMITS)


def build(guided: generate.GuidedDecoding) -> None:
    """Compile a grammar as llama.cpp will. Raises InvalidRequest."""
    text = translation.compose_grammar(guided)
    if text.startswith(translation.LARK):
        lark = llguidance.LLMatcher.grammar_from_lark(text)
        if reason := llguidance.LLMatcher.validate_grammar(lark):
            raise trials.refuse(guided, reason)


if __name__ == "__main__":
    build(trials.WARM_UP)
    trials.serve(build, LIMITS)
