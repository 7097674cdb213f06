"""Answers that are not streamed: gathered, and sent as one body when all choices are complete."""

from collections.abc import Sequence

from dynamo.frontend import metrics
from dynamo.frontend.delivery import choices, delivery, sse
from dynamo.protocols import generate
from dynamo.runtime.http import exchange


class WholeDelivery(delivery.Delivery):
    """Keeps the text of each choice until the last one ends."""

    def __init__(
        self,
        client: exchange.Exchange,
        prepared: delivery.PreparedRequest[sse.AnswerFormatter],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, prepared, meter)
        self._texts: list[list[str]] = [[] for _ in self.choices]
        self._reports: list[list[choices.TokenReport]] = [[] for _ in self.choices]

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        number = first + output.index
        choice = self.choices[number]
        if choice.is_over:
            return
        self.count_tokens(choice, len(output.token_ids))
        self.record_cached(choice, output)
        text, reports = choice.read(output)
        self._texts[number].append(text)
        if reports:
            self._reports[number] += reports
        if self.settle(choice):
            self._respond()

    def _respond(self) -> None:
        selected = [
            choice
            for number in range(len(self.prepared.prompts))
            for choice in self._select_best(number)
        ]
        has_reports = self.prepared.request.num_logprobs is not None
        answers = [
            sse.WholeChoice(
                index,
                choice.take_pieces("".join(self._texts[choice.index])),
                sse.finish_reason(choice),
                self._reports[choice.index] if has_reports else None,
                choice.text.stop_reason,
            )
            for index, choice in enumerate(selected)
        ]
        whole = self.prepared.formatter.whole(answers, self.usage())
        body = {**whole, **self.extra_fields(is_last=True)}
        self.client.respond(200, sse.encode(body), headers=self.prepared.headers)

    def _select_best(self, prompt_number: int) -> Sequence[choices.Choice]:
        """Return the answers to this prompt that the client receives: of more than requested the likeliest first."""
        drawn, num_choices = self.choices_of(prompt_number), self.prepared.request.num_choices
        if len(drawn) == num_choices:
            return drawn
        return sorted(drawn, key=_mean_logprob, reverse=True)[:num_choices]


def _mean_logprob(choice: choices.Choice) -> float:
    return choice.reporter.mean_logprob if choice.reporter is not None else 0.0
