"""The process in which the native engine tries grammars (`engine.trials`), with the model's tokenizer."""

import sys
from pathlib import Path

from dynamo.base import errors
from dynamo.engine import trials
from dynamo.engine.native import guided_decoding

LIMITS = trials.TrialLimits(
    cpu_s=2,  # an ordinary grammar takes a thousandth of it
    memory=2**29,
    wall_s=300,
)


def start(tokenizer_path: Path, vocab_size: int, eos: tuple[int, ...]) -> trials.TrialProcess:
    """Start the process; it reads the tokenizer before its first trial."""
    arguments = [str(tokenizer_path), str(vocab_size), ",".join(map(str, eos))]
    return trials.TrialProcess(__name__, arguments)


def main(arguments: list[str]) -> None:
    """Serve the worker that started this process."""
    path, vocab_size, eos = arguments
    end_ids = tuple(map(int, eos.split(",")))
    try:
        builder = guided_decoding.GrammarBuilder(Path(path), int(vocab_size), end_ids)
    except errors.EngineFailed:
        sys.exit(1)  # the worker, which reads the same file, reports it
    builder.build(trials.WARM_UP)  # children share its tables
    trials.serve(builder.build, LIMITS)


if __name__ == "__main__":
    main(sys.argv[1:])
