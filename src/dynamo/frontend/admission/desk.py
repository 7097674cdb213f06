"""What the pipeline asks before it gives a request to workers, and what follows from the settings.

`Desk.admit` is the way in: the key's model, tokens and answers at the same time, then the model's gate. What it takes
it gives back when the request's meter says that the request is over, however it ended.
"""

from collections.abc import Callable, Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import metrics as frontend_metrics
from dynamo.frontend.admission import busy, gate, keys, limits, metrics, thresholds
from dynamo.frontend.catalog import models
from dynamo.frontend.catalog.served_model import ServedModel
from dynamo.protocols import embed, generate
from dynamo.runtime.http import exchange


class Desk:
    """One for a frontend. `book` is None if nobody needs a key."""

    def __init__(
        self,
        known: models.Models,
        rules: gate.Rules,
        at_start: busy.Thresholds,
        book: keys.GuestBook | None,
        counts: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._models = known
        self.loads = busy.Loads()
        self.thresholds = thresholds.ThresholdBook(known, at_start)
        self._rules = rules
        self._book = book
        self._counts = counts
        self._clock = clock
        self._gates: dict[str, gate.Gate] = {}
        if rules.concurrency_limit is not None:
            counts.show_limit(metrics.Closed.REQUEST_CONCURRENCY, rules.concurrency_limit)

    async def admit(
        self,
        model: ServedModel,
        prompts: Sequence[generate.Request | embed.Request],
        caller: exchange.Exchange,
        meter: frontend_metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        """Return when the request may go to a worker. Raises Forbidden, RateLimited, Overloaded or Cancelled."""
        num_tokens = sum(one.prompt_len for one in prompts)
        stay = _Stay(self._clock.now)
        meter.on_end = stay.end
        if self._book is not None:
            guest = self._book.identify(caller.request.headers)
            self._charge(model.name, guest, num_tokens, caller)
            stay.accounts, stay.num_prompt_tokens = guest.accounts, num_tokens
        entry = self._gate(model)
        try:
            await entry.enter(
                caller,
                priority=max(one.priority for one in prompts),
                num_tokens=num_tokens,
                ignores_load=instance_id is not None,
            )
        except errors.Cancelled:
            meter.disconnected()
            raise
        stay.leave = entry.leave

    def busy_workers(self, model: ServedModel) -> frozenset[int]:
        """Instances of the model that should get nothing now."""
        limits_of_model = self.thresholds.of(model.name)
        if not limits_of_model.are_set:
            return frozenset()
        return self.loads.busy_among(
            [one.instance_id for one in model.instances],
            limits_of_model,
            model.card.runtime_config.max_num_batched_tokens,
            self._clock.now(),
        )

    def look(self) -> None:
        """Something changed: let in for whom there is room now."""
        for one in self._gates.values():
            one.look()

    def _gate(self, model: ServedModel) -> gate.Gate:
        if model.name not in self._gates:
            self._gates[model.name] = gate.Gate(
                model.name, self._rules, self._num_free(model.name), self._counts, self._clock
            )
        return self._gates[model.name]

    def may_see(self, caller: exchange.Exchange, model: str) -> bool:
        """Is this model one of the caller's?"""
        return self._book is None or self._book.identify(caller.request.headers).may_ask(model)

    def check_may_see(self, caller: exchange.Exchange, model: str) -> None:
        """Raises Forbidden."""
        if not self.may_see(caller, model):
            raise errors.Forbidden(f"this key may not ask the model {model!r}")

    def _num_free(self, name: str) -> Callable[[], int | None]:
        """How many workers of this model are not busy; None: nobody can be, or nobody is there to ask."""

        def count() -> int | None:
            if not self.thresholds.of(name).are_set:
                return None
            try:
                model = self._models.find(name)
            except errors.DynamoError:
                return None
            return len(model.instances) - len(self.busy_workers(model))

        return count

    def _charge(
        self, model: str, guest: keys.Guest, num_tokens: int, caller: exchange.Exchange
    ) -> None:
        """What the key may, and what it costs."""
        if not guest.may_ask(model):
            raise errors.Forbidden(f"the key {guest.entry.name!r} may not ask the model {model!r}")
        now = self._clock.now()
        try:
            limits.begin(guest.accounts, num_tokens, now)
        except errors.RateLimited:
            self._counts.rejected(metrics.Closed.KEY_LIMIT, model)
            raise
        finally:
            caller.headers = limits.headers(guest.accounts, now)


class _Stay:
    """What one request holds until it ends."""

    __slots__ = ("_now", "accounts", "leave", "num_prompt_tokens")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.accounts: tuple[limits.Account, ...] = ()
        self.num_prompt_tokens = 0
        self.leave: Callable[[], None] | None = None

    def end(self, num_output_tokens: int) -> None:
        """The meter's last word. Who never came in gets the tokens of the prompt back."""
        if self.leave is not None:
            self.leave()
            limits.end(self.accounts, num_output_tokens, self._now())
        else:
            limits.end(self.accounts, -self.num_prompt_tokens, self._now())
