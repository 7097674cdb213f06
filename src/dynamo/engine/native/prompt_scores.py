"""How likely a prompt is: the log probability of each of its tokens, for callers that compare texts.

The model says it in passing, as it computes the prompt; only the output layer has more to do, for all rows instead of
the last. A row is as long as the vocabulary, so few are looked at together. A prompt may come in several chunks, and
after a preemption once more: what is known stays known, and is told with the first token of the answer.
"""

import dataclasses
from collections.abc import Callable

import torch

from dynamo.base import errors
from dynamo.engine.native import sampler
from dynamo.engine.native.sequence import Chunk, Sampled, Sequence
from dynamo.protocols import generate

ROWS_AT_ONCE = 64  # of 150,000 tokens and 32 bits: 40 MB
LogitsOf = Callable[[list[int]], torch.Tensor]  # rows of the batch to logits [rows, vocabulary]


class PromptScores:
    """What is known of the prompts that are being computed."""

    def __init__(self) -> None:
        self._found: dict[Sequence, list[generate.TokenLogprobs]] = {}

    def read(self, chunk: Chunk, first_row: int, logits_of: LogitsOf) -> None:
        """The chunk was computed; its first token is this row of the batch."""
        sequence = chunk.sequence
        found = self._found.setdefault(sequence, [])
        end = min(chunk.start + chunk.num_tokens, sequence.prompt_len - 1)
        num = sequence.request.output_options.prompt_logprobs or 0
        for start in range(max(chunk.start, len(found)), end, ROWS_AT_ONCE):
            places = range(start, min(start + ROWS_AT_ONCE, end))
            logits = logits_of([first_row + place - chunk.start for place in places])
            next_ids = sequence.token_ids[places.start + 1 : places.stop + 1]
            found += sampler.report(logits, next_ids, [num] * len(places))

    def tell(
        self, sequence: Sequence, drawn: Sampled | errors.DynamoError
    ) -> Sampled | errors.DynamoError:
        """The first token of an answer, with what was found, if its caller asked."""
        found = self._found.pop(sequence, None)
        if found is None or isinstance(drawn, errors.DynamoError):
            return drawn
        return dataclasses.replace(drawn, prompt_logprobs=tuple(found))

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence."""
        self._found.pop(sequence, None)
