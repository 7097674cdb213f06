"""Prefill policies: whether the worker that answers computes a prompt (local), or a prefill worker does (remote).

`LengthPolicy`: remote, if the prompt without its cached prefix is longer than `max_local_prefill_length`, because a
long local prefill would delay every answer that is being written; but only while the remote queue is short, because a
prompt that waits there saves nothing. Both numbers may change at run time. What a cached prefix leaves below one block
is local in any case: the step that writes the first token computes it as well.

`ConditionalPolicy`, the original's: local, if little is new to the answering worker, or the prefill workers are busy.

`EstimatePolicy`, our own: the prompt is computed where that delays all requests least, its own first token included.

    local  = tokens ahead of it + its new tokens × (1 + answers that are being written there)
    remote = tokens ahead of it there + its new tokens there + handing over + copying

in seconds, at the pace at which prompts have been computed lately. A local prefill stops every answer that the worker
is writing for as long as it takes, so it counts once for each; a prefill worker writes no answers. So where nothing
runs a prompt stays, however long, and saves the copy; beside running answers even a short one goes.
"""  # decider

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec

from dynamo.router import api as routing

MAX_LOCAL_PREFILL_LENGTH = 1000  # tokens
MAX_PREFILL_QUEUE_SIZE = 2
# a request to another process, and one more decode step (measured: docs/benchmarks.md)
HANDOFF_S = 0.004
EstimateLoad = Callable[[], routing.LoadEstimate]
ConditionalRule = Literal["isl_bounding", "prefill_load", "isl_or_load"]


class LimitsChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value in discovery under `limits_key`; a missing field is as the process was started."""

    max_local_prefill_length: int | None = None
    max_prefill_queue_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefillLimits:
    """Up to which prompt length, in tokens, and from which remote queue size on a prompt is computed locally."""

    max_local_prefill_length: int = MAX_LOCAL_PREFILL_LENGTH
    max_prefill_queue_size: int = MAX_PREFILL_QUEUE_SIZE

    def with_change(self, change: LimitsChange) -> "LocalPrefillLimits":
        """Return the limits with the fields that the change sets."""
        length, size = change.max_local_prefill_length, change.max_prefill_queue_size
        return LocalPrefillLimits(
            max_local_prefill_length=self.max_local_prefill_length if length is None else length,
            max_prefill_queue_size=self.max_prefill_queue_size if size is None else size,
        )

    def allow_remote(self, prefill_length: int, queue_size: int | None) -> bool:
        """Return whether a prompt with this many tokens to compute goes to a prefill worker.

        `queue_size` None: there is no prefill worker.
        """
        return (
            queue_size is not None
            and prefill_length > self.max_local_prefill_length
            and queue_size < self.max_prefill_queue_size
        )


def limits_key(model: str) -> str:
    """Return the key of a model's limits in discovery (the name is the original's)."""
    return f"public/components/disagg_router/models/chat/{model}"


class PrefillPolicy(Protocol):
    """Decides for prompts that a prefill worker could compute."""

    def may_be_remote(self, prompt_len: int, queue_size: int) -> bool:
        """Return whether the prompt could be remote, whatever the estimates say. Called first, because it is cheap."""
        ...

    def is_remote(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> bool:
        """Return whether a prefill worker computes the prompt.

        `queue_size` is the number of prompts that wait at the least loaded prefill worker; `local` and `remote`
        estimate the load where the prompt would be computed, which costs time.
        """
        ...

    def explain(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> str:
        """Return the figures of this decision in words, whichever way it goes."""
        ...


class LengthPolicy:
    """`--disagg-policy lengths`. The limits may change at any time."""

    def __init__(self, limits: LocalPrefillLimits) -> None:
        self._default = self.limits = limits
        self._change = LimitsChange()

    def set_default(self, limits: LocalPrefillLimits) -> None:
        """Replace the limits of construction; a change of them stays."""
        self._default, self.limits = limits, limits.with_change(self._change)

    def change_limits(self, change: LimitsChange) -> None:
        """Set the limits to the default ones with this change."""
        self._change, self.limits = change, self._default.with_change(change)

    def may_be_remote(self, prompt_len: int, queue_size: int) -> bool:
        """Return whether the whole prompt is longer than the limit."""
        return self.limits.allow_remote(prompt_len, queue_size)

    def is_remote(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> bool:
        """Return whether what is new to the local cache is longer than the limit, and a block at least or all."""
        del remote
        here = local()
        is_enough = here.num_new >= here.block_size or here.num_new == prompt_len
        return is_enough and self.limits.allow_remote(here.num_new, queue_size)

    def explain(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> str:
        """Name the new tokens and the queue beside their limits."""
        del remote
        limits = self.limits
        return (
            f"new to the answering worker: {local().num_new} of {prompt_len} tokens (remote above "
            f"{limits.max_local_prefill_length}, if they are a block or all); waiting for a prefill worker: "
            f"{queue_size} (remote below {limits.max_prefill_queue_size})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalPolicy:
    """`--router-conditional-disagg`, by the original's names and rules.

    `prefill_busy_threshold` is in full steps of the prefill worker, `decode_busy_threshold` a share of the blocks of
    the answering worker; a worker that does not publish how many blocks it has counts as full.
    """

    policy: ConditionalRule = "isl_bounding"
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    prefill_busy_threshold: Annotated[float, msgspec.Meta(ge=0)] | None = None
    decode_busy_threshold: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def may_be_remote(self, prompt_len: int, queue_size: int) -> bool:
        """Return True: a prompt that is all new is remote, however short."""
        del prompt_len, queue_size
        return True

    def is_remote(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> bool:
        """Return whether the answering worker is full, or the prompt is new to it and prefill workers are not busy."""
        del queue_size
        here = local()
        if self.decode_busy_threshold is not None and (
            here.share_in_use is None or here.share_in_use > self.decode_busy_threshold
        ):
            return True
        is_mostly_cached = (
            self.policy != "prefill_load"
            and here.num_new < self.eff_isl_threshold
            and here.num_new < self.eff_isl_ratio_threshold * prompt_len
        )
        if is_mostly_cached:
            return False
        busy_threshold = self.prefill_busy_threshold
        if self.policy == "isl_bounding" or busy_threshold is None:
            return True
        return remote().num_steps_ahead <= busy_threshold

    def explain(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> str:
        """Name the new tokens and the load at both workers beside their thresholds."""
        del queue_size
        here, there = local(), remote()
        share = "unknown" if here.share_in_use is None else f"{here.share_in_use:.0%}"
        return (
            f"rule {self.policy}; new to the answering worker: {here.num_new} of {prompt_len} tokens (few: below "
            f"{self.eff_isl_threshold} and {self.eff_isl_ratio_threshold:.0%}); its blocks in use: {share} (busy: "
            f"{_threshold(self.decode_busy_threshold)}); steps ahead at the prefill worker: "
            f"{there.num_steps_ahead:.1f} (busy: {_threshold(self.prefill_busy_threshold)})"
        )


def _threshold(value: float | None) -> str:
    return "never" if value is None else f"above {value:g}"


class EstimatePolicy:
    """Computes a prompt where it delays all requests less, itself included (`--disagg-policy estimated`)."""

    def may_be_remote(self, prompt_len: int, queue_size: int) -> bool:
        """Return True: only the estimates decide."""
        del prompt_len, queue_size
        return True

    def is_remote(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> bool:
        """Return whether the estimated delay is shorter remotely."""
        del prompt_len, queue_size
        local_s, remote_s = self._delays(local(), remote())
        return remote_s < local_s

    def explain(
        self, prompt_len: int, queue_size: int, local: EstimateLoad, remote: EstimateLoad
    ) -> str:
        """Name both estimated delays."""
        del queue_size
        here = local()
        local_s, remote_s = self._delays(here, remote())
        return (
            f"new to the answering worker: {here.num_new} of {prompt_len} tokens; requests there: "
            f"{here.num_requests}; estimated delay of all requests: {local_s * 1e3:.1f} ms if it computes them, "
            f"{remote_s * 1e3:.1f} ms if a prefill worker does"
        )

    def _delays(
        self, here: routing.LoadEstimate, there: routing.LoadEstimate
    ) -> tuple[float, float]:
        """Return the delays of a local and of a remote prefill, in seconds."""
        pace = there.tokens_per_s
        local_s = (here.num_ahead + here.num_new * (1 + here.num_requests)) / pace
        remote_s = (there.num_ahead + there.num_new) / pace
        copy_s = here.num_new / here.copies_per_s if here.copies_per_s else 0.0
        return local_s, remote_s + HANDOFF_S + copy_s
