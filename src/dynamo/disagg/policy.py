"""Where a prompt is computed: by the worker that answers it (*here*), or by a prefill worker (*there*).

`Lengths`: there, if what is left of it after the known prefix is longer than `max_local_prefill_length`, because a long
prefill here would delay every answer that is being written; but only while the queue there is short, because a prompt
that waits there helps nobody. Both numbers may change at run time.

`Conditional`, the original's: here, if little is new to the worker that would answer, or the prefill workers are busy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec

from dynamo.router import api as routing

MAX_LOCAL_PREFILL_LENGTH = 1000  # tokens
MAX_PREFILL_QUEUE_SIZE = 2
Look = Callable[[], routing.LoadEstimate]
ConditionalPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands in discovery under `key_of` the model; what it leaves out is as the process was started."""

    max_local_prefill_length: int | None = None
    max_prefill_queue_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of what is computed here."""

    max_local_prefill_length: int = MAX_LOCAL_PREFILL_LENGTH
    max_prefill_queue_size: int = MAX_PREFILL_QUEUE_SIZE

    def changed(self, change: Change) -> "Limits":
        """With what the change names."""
        length, size = change.max_local_prefill_length, change.max_prefill_queue_size
        return Limits(
            max_local_prefill_length=self.max_local_prefill_length if length is None else length,
            max_prefill_queue_size=self.max_prefill_queue_size if size is None else size,
        )


def key_of(model: str) -> str:
    """Where a model's limits stand in discovery (the name is the original's)."""
    return f"public/components/disagg_router/models/chat/{model}"


def goes_away(prefill_length: int, queue_size: int | None, limits: Limits) -> bool:
    """Is a prompt, of which so many tokens are to be computed, computed elsewhere? `queue_size` None: by nobody."""
    return (
        queue_size is not None
        and prefill_length > limits.max_local_prefill_length
        and queue_size < limits.max_prefill_queue_size
    )


class Policy(Protocol):
    """How it is decided for prompts that somebody could compute elsewhere."""

    def may_go(self, prompt_len: int, queue_size: int) -> bool:
        """Could it go, whatever else is found? Asked first, because it costs nothing."""
        ...

    def goes(self, prompt_len: int, queue_size: int, here: Look, there: Look) -> bool:
        """Does it go? `queue_size`: prompts that wait there where the fewest do; `here` and `there` cost a look."""
        ...


class Lengths:
    """`--disagg-policy lengths`. The limits may change at any time."""

    def __init__(self, limits: Limits) -> None:
        self._default = self.limits = limits

    def change(self, change: Change) -> None:
        """Of those that it was made with."""
        self.limits = self._default.changed(change)

    def may_go(self, prompt_len: int, queue_size: int) -> bool:
        """As `Policy`."""
        return goes_away(prompt_len, queue_size, self.limits)

    def goes(self, prompt_len: int, queue_size: int, here: Look, there: Look) -> bool:
        """As `Policy`."""
        del prompt_len, there
        return goes_away(here().num_new, queue_size, self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditional:
    """`--router-conditional-disagg`, by the original's names and rules.

    `prefill_busy_threshold` is in full steps of the prefill worker, `decode_busy_threshold` a share of the blocks of
    who would answer; one that does not say how many it has counts as full.
    """

    policy: ConditionalPolicy = "isl_bounding"
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    prefill_busy_threshold: Annotated[float, msgspec.Meta(ge=0)] | None = None
    decode_busy_threshold: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def may_go(self, prompt_len: int, queue_size: int) -> bool:
        """As `Policy`: a prompt that is all new goes, however short."""
        del prompt_len, queue_size
        return True

    def goes(self, prompt_len: int, queue_size: int, here: Look, there: Look) -> bool:
        """As `Policy`."""
        del queue_size
        one = here()
        return self._is_full(one) or not (
            self._is_known(one.num_new, prompt_len) or self._is_busy(there)
        )

    def _is_known(self, num_new: int, prompt_len: int) -> bool:
        """Is little of it new, *and* most known?"""
        return (
            self.policy != "prefill_load"
            and num_new < self.eff_isl_threshold
            and num_new < self.eff_isl_ratio_threshold * prompt_len
        )

    def _is_busy(self, there: Look) -> bool:
        return (
            self.policy != "isl_bounding"
            and self.prefill_busy_threshold is not None
            and there().num_steps_ahead > self.prefill_busy_threshold
        )

    def _is_full(self, here: routing.LoadEstimate) -> bool:
        if self.decode_busy_threshold is None:
            return False
        return here.share_in_use is None or here.share_in_use > self.decode_busy_threshold
