"""The text of one choice, from an engine's outputs: detokenized, without stop strings and the token that ended it."""

import array
from collections.abc import Sequence

from dynamo.preprocess import detokenize, stop_strings
from dynamo.protocols import blocks, generate

_ENDED_BY_TOKEN = (generate.FinishReason.EOS, generate.FinishReason.STOP)


class ChoiceText:
    """The text of one choice, and its tokens, four bytes each, from which another worker may have to continue it.

    Once `stop_reason` is set the text is complete, whatever the engine still sends.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "_tokens", "stop_reason")

    def __init__(
        self, detokenizer: detokenize.Detokenizer, conditions: generate.StopConditions
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stop_strings.StopStrings(conditions.stop) if conditions.stop else None
        self._min_tokens = conditions.min_tokens
        self._tokens = array.array("I")
        self.stop_reason: str | None = None  # the stop string that ended the text

    def push(self, output: generate.Output) -> str:
        """Add an output; return the text that is now certain, or all pending text if the output has a finish reason."""
        token_ids = output.token_ids
        if len(token_ids) == 1:  # nearly always so
            self._tokens.append(token_ids[0])
        else:
            self._tokens.extend(token_ids)
        if output.finish_reason is None and self._stops is None:
            return self._detokenizer.push(token_ids)
        text = self._detokenizer.push(visible_ids(output))
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        if self._stops is not None and len(self._tokens) > self._min_tokens:
            text, self.stop_reason = self._stops.push(text)
            if output.finish_reason is not None and self.stop_reason is None:
                text += self._stops.flush()
        return text

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens generated so far."""
        return len(self._tokens)

    @property
    def token_ids(self) -> bytes:
        """Return all generated tokens, packed."""
        return blocks.pack(self._tokens)

    @property
    def num_held(self) -> int:
        """Return the number of characters that are held back, because they may become a stop string."""
        return self._stops.num_held if self._stops is not None else 0


def visible_ids(output: generate.Output) -> Sequence[int]:
    """Return the tokens of this output without the one that ended the choice."""
    ids = output.token_ids
    return ids[:-1] if output.finish_reason in _ENDED_BY_TOKEN else ids
