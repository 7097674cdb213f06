"""Where a prompt is computed: here, or at a prefill worker.

Elsewhere if what is left of it after the known prefix is longer than `max_local_prefill_length`, because a long
prefill here would delay every answer that is being written; but only while the queue there is short, because a prompt
that waits there helps nobody. Both numbers may change at run time.
"""

from dataclasses import dataclass

import msgspec

MAX_LOCAL_PREFILL_LENGTH = 1000  # tokens
MAX_PREFILL_QUEUE_SIZE = 2


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands in discovery under `key_of` the model; what it leaves out is as the worker was started."""

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
