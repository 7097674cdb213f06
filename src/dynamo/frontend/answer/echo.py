"""An answer that begins with its prompt, as completions do if `echo` is asked for.

With log probabilities the prompt's tokens have theirs too, and with `max_tokens: 0` there is nothing else: so
evaluators let a model score a text. No engine can draw no token; it draws one, which is not told.
"""

from dynamo.frontend.answer import choices
from dynamo.preprocess import choice_text, preprocessor
from dynamo.protocols import blocks, generate

Read = tuple[str, list[choices.TokenReport] | None]


class Echo:
    """A prompt, as all answers to it begin. What its tokens are worth comes with the engine's first output."""

    def __init__(self, prompt: preprocessor.Prepared, preparer: preprocessor.Preprocessor) -> None:
        self._token_ids = prompt.request.token_ids
        self._is_text = prompt.prompt is not None
        self._decoder = preparer.text
        self.reports: list[choices.TokenReport] = []
        self.text = (
            preparer.text.decode(self._token_ids) if prompt.prompt is None else prompt.prompt
        )

    def learn(self, output: generate.Output) -> None:
        """If this output tells of the prompt, note it. Its first token follows nothing: it has no probability."""
        if output.prompt_logprobs is None:
            return
        detokenizer = self._decoder.new(skip_special_tokens=self._is_text)
        logprobs, start = (None, *output.prompt_logprobs), 0
        for token_id, found in zip(blocks.unpack(self._token_ids), logprobs, strict=True):
            self.reports.append(choices.TokenReport(token_id, found, start))
            start += len(detokenizer.push((token_id,)))


class EchoedChoice(choices.Choice):
    """One of the answers to a prompt."""

    __slots__ = ("_echo", "_has_begun", "_is_scored")

    def __init__(
        self,
        index: int,
        text: choice_text.ChoiceText,
        echo: Echo,
        *,
        has_logprobs: bool,
        is_scored: bool,
    ) -> None:
        super().__init__(index, text, has_logprobs=has_logprobs)
        self._echo = echo
        self._is_scored = is_scored  # nothing follows the prompt
        self._has_begun = False

    def read(self, output: generate.Output) -> Read:
        self._echo.learn(output)
        text, reports = self._read_nothing(output) if self._is_scored else super().read(output)
        if reports is not None:
            shift = len(self._echo.text)
            reports = [report._replace(start=report.start + shift) for report in reports]
        if self._has_begun:
            return text, reports
        self._has_begun = True
        return self._echo.text + text, None if reports is None else self._echo.reports + reports

    def _read_nothing(self, output: generate.Output) -> Read:
        if output.finish_reason is not None:
            self.finish_reason = generate.FinishReason.LENGTH
        return "", None if self.reporter is None else []
