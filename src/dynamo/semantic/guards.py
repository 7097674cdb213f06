"""Guards: may a request pass, read in all of the text that a model would see.

Routing, the classification API and batches use the same classifiers over the same windows. Each verdict says what the
guard found and what follows from it; acting on it is the router's.
"""  # decider

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from dynamo.semantic import config, immediate
from dynamo.semantic.classifiers import attacks, pii, profile

Action = Literal["none", "observe", "route", "block"]
FAILURE = immediate.FAILURE  # the label of a guard that failed


class GuardClassifiers(Protocol):
    """The classifiers that guards ask."""

    def classify_attack(self, text: str) -> attacks.AttackScore:
        """Return the risk that some window of the text is an attack."""
        ...

    def find_pii(self, text: str) -> tuple[list[pii.PiiSpan], bool]:
        """Return the personal data in a text, and whether all of it was read."""
        ...


class RequestClassifiers(GuardClassifiers, Protocol):
    """The classifiers that a request's signals and guards ask."""

    def embed(self, text: str) -> npt.NDArray[np.float32] | None:
        """Return the vector of a text; None without an encoder."""
        ...

    def classify_domain(self, text: str) -> profile.DomainScore:
        """Return the category of a text; `other` where none is likely."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardVerdict:
    """What a guard found. It never holds the text itself."""

    guard: Literal["jailbreak", "pii"]
    action: Action = "none"
    route_to: str | None = None
    risk: float = 0.0  # the probability of an attack
    labels: tuple[str, ...] = ()  # types of personal data, or names of rules
    reason: str = ""
    is_complete: bool = True  # all of the text was read


def check_attack(
    texts: Sequence[str],
    guard: config.PromptGuard,
    plugin: config.JailbreakPlugin | None,
    classifiers: GuardClassifiers,
) -> GuardVerdict | None:
    """Return the verdict on attacks in the texts; None where the guard is off. The decision's plugin goes first."""
    if not (guard.enabled if plugin is None else plugin.enabled):
        return None
    threshold, mode, route_to = guard.threshold, guard.mode, guard.route_to
    if plugin is not None:
        threshold = threshold if plugin.threshold is None else plugin.threshold
        mode, route_to = plugin.mode or mode, plugin.route_to or route_to
    try:
        scores = [classifiers.classify_attack(text) for text in texts]
    except Exception as error:  # noqa: BLE001  # a fault of the guard: the configuration says what follows
        return _failed("jailbreak", mode, guard.on_error, error)
    worst = max(
        scores, key=lambda score: score.risk, default=attacks.AttackScore(0.0, "benign", ())
    )
    is_complete = all(score.is_complete for score in scores)
    if worst.risk < threshold:
        return GuardVerdict(guard="jailbreak", risk=worst.risk, is_complete=is_complete)
    return GuardVerdict(
        guard="jailbreak",
        action=_ACTIONS[mode],
        route_to=route_to if mode == "route" else None,
        risk=worst.risk,
        labels=worst.rules or ("classifier",),
        reason=f"risk {worst.risk:.3f} is at least {threshold:g}",
        is_complete=is_complete,
    )


def check_pii(
    texts: Sequence[str],
    plugin: config.PiiPlugin | None,
    usual_threshold: float,
    classifiers: GuardClassifiers,
) -> GuardVerdict | None:
    """Return the verdict on personal data in the texts; None where the decision has no such guard."""
    if plugin is None or not plugin.enabled:
        return None
    threshold = usual_threshold if plugin.threshold is None else plugin.threshold
    if threshold == 0:
        return None
    try:
        results = [classifiers.find_pii(text) for text in texts]
    except Exception as error:  # noqa: BLE001  # a fault of the guard: the configuration says what follows
        return _failed("pii", plugin.mode, plugin.on_error, error)
    is_complete = all(complete for _, complete in results)
    labels = {
        span.type
        for spans, _ in results
        for span in spans
        if span.confidence >= threshold and span.type not in plugin.pii_types_allowed
    }
    if not labels:
        return GuardVerdict(guard="pii", is_complete=is_complete)
    return GuardVerdict(
        guard="pii",
        action=_ACTIONS[plugin.mode],
        route_to=plugin.route_to if plugin.mode == "route" else None,
        labels=tuple(f"B-{label}" for label in sorted(labels)),
        reason="found " + ", ".join(sorted(labels)),
        is_complete=is_complete,
    )


_ACTIONS: dict[str, Action] = {"enforce": "block", "observe": "observe", "route": "route"}


def _failed(
    guard: Literal["jailbreak", "pii"],
    mode: config.GuardMode,
    on_error: config.OnError,
    error: Exception,
) -> GuardVerdict:
    """Return the verdict of a guard that failed; the text of the error stays out, it may hold the prompt.

    A guard that only observes never blocks.
    """
    action: Action = "block" if on_error == "block" and mode != "observe" else "none"
    return GuardVerdict(
        guard=guard,
        action=action,
        labels=(FAILURE,),
        reason=f"the guard failed: {type(error).__name__}",
        is_complete=False,
    )
