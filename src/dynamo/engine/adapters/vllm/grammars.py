"""Grammars for vLLM: each new one is tried by vLLM's own code, in a process that can be ended (`engine.trials`).

vLLM checks a grammar on the worker's event loop and compiles it in a few threads of its engine, both without an end: a
schema of a few hundred characters would stop the worker, or all guided answers. The process starts
with the first guided request, because it imports vLLM once more.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dynamo.engine import trials
from dynamo.engine.adapters import translation
from dynamo.protocols import generate

LIMITS = trials.TrialLimits(
    cpu_s=10,  # of large vocabularies: vLLM's XGrammar looks at each token in each state
    memory=2**30,
    wall_s=600,
)
MAX_CHECK_S = 1.0  # of the event loop, for which all streams of the worker wait
_ENVIRONMENT = {  # threads do not survive a fork, and each would reserve memory of its own
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_CONFIG_PATH": "",  # the worker's; vLLM takes none where it configures no logging
}
_WITHOUT_LOGGING = {"log_config_file": None, "logging_config": None}  # likewise, of the flags


def make_trials(model: Path, flags: Sequence[str]) -> trials.GrammarTrials:
    """Return the trials of an engine with these flags of vLLM's, beside the directory of its model."""
    arguments = [str(model), *flags]
    return trials.GrammarTrials(__name__, arguments, LIMITS, environment=_ENVIRONMENT)


def main(model: str, *flags: str) -> None:
    """Serve the worker that started this process."""
    from dynamo.engine.adapters.vllm import versions  # takes seconds, and is in the worker already

    config = versions.make_config(versions.read_flags(flags, {"model": model, **_WITHOUT_LOGGING}))
    structured = config.structured_outputs_config
    support = translation.GuidedSupport(structured.backend, bool(structured.reasoning_parser))
    compile_grammar = versions.make_grammar_compiler(config)

    def build(guided: generate.GuidedDecoding) -> None:
        check_s = compile_grammar(translation.structured_output_fields(guided, support))
        if check_s > MAX_CHECK_S:
            raise trials.refuse(guided, f"vLLM needs {check_s:.1f} s to check it")

    build(trials.WARM_UP)  # children share its tables
    trials.serve(build, LIMITS)


if __name__ == "__main__":
    main(*sys.argv[1:])
