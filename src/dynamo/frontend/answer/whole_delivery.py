"""An answer that is not streamed: gathered, and sent as one body when all its choices are over."""

from collections.abc import Sequence

from dynamo.frontend import metrics
from dynamo.frontend.answer import choices, delivery, sse
from dynamo.protocols import generate
from dynamo.runtime.http import exchange


class WholeDelivery(delivery.Delivery):
    """Keeps the text of each choice until the last one ends."""

    def __init__(
        self,
        client: exchange.Exchange,
        order: delivery.Order[sse.Shape],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, order, meter)
        self._texts: list[list[str]] = [[] for _ in self.choices]
        self._reports: list[list[choices.TokenReport]] = [[] for _ in self.choices]

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        number = first + output.index
        choice = self.choices[number]
        if choice.is_over:
            return
        self.count_tokens(choice, len(output.token_ids))
        self.note_cached(choice, output)
        text, reports = choice.read(output)
        self._texts[number].append(text)
        if reports:
            self._reports[number] += reports
        if self.settle(choice):
            self._respond()

    def _respond(self) -> None:
        told = [
            choice for number in range(len(self.order.prompts)) for choice in self._best(number)
        ]
        answers = [self._whole(index, choice) for index, choice in enumerate(told)]
        body = {**self.order.shape.whole(answers, self.usage()), **self.extra_fields(is_last=True)}
        self.client.respond(200, sse.encode(body), headers=self.order.headers)

    def _best(self, prompt_number: int) -> Sequence[choices.Choice]:
        """The answers to this prompt that are told: of more than were asked for the likeliest, best first."""
        found, num_told = self.choices_of(prompt_number), self.order.request.num_choices
        if len(found) == num_told:
            return found
        return sorted(found, key=_mean_logprob, reverse=True)[:num_told]

    def _whole(self, index: int, choice: choices.Choice) -> sse.WholeChoice:
        has_reports = self.order.request.num_logprobs is not None
        return sse.WholeChoice(
            index,
            choice.pieces("".join(self._texts[choice.index])),
            sse.finish_reason(choice),
            self._reports[choice.index] if has_reports else None,
            choice.text.stop_reason,
        )


def _mean_logprob(choice: choices.Choice) -> float:
    return choice.reporter.mean_logprob if choice.reporter is not None else 0.0
