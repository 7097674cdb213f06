"""A limit to how long a model may think: when it is reached, the mark that ends a thought is what comes next.

A thought stands at the beginning of an answer: the prompt has opened it, or the answer does within its first tokens. An
opening mark later on is something the model speaks of.
"""

from dynamo.engine.native.sequence import Sequence
from dynamo.protocols import generate

MAX_LEADING = 4  # tokens, mostly white space, that may stand before the opening mark


class ThoughtWatch:
    """Follows one sequence as it grows. A preempted sequence keeps its tokens, so nothing has to be restored."""

    def __init__(self, sequence: Sequence, limit: generate.ThinkingLimit) -> None:
        self._sequence = sequence
        self._limit = limit
        self._num_read = sequence.answer_start
        self._is_open = limit.is_open
        self._is_over = False
        self._num_thought = 0

    def forced_id(self) -> int | None:
        """The token that has to come next, if it is time to end the thought."""
        self._catch_up()
        is_due = self._is_open and not self._is_over
        if is_due and self._num_thought >= self._limit.max_tokens:
            return self._limit.close_ids[0]
        return None

    def _catch_up(self) -> None:
        for token in self._sequence.token_ids[self._num_read :]:
            self._num_read += 1
            self._read(token)

    def _read(self, token: int) -> None:
        if token in self._limit.close_ids:
            self._is_over = True
        elif self._is_open:
            self._num_thought += 1
        elif token in self._limit.open_ids:
            self._is_open = True
        elif self._num_read - self._sequence.answer_start > MAX_LEADING:
            self._is_over = True
