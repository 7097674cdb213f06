"""Which models of one machine are loaded: those that are asked for, within a budget of memory.

A model is loaded when a request waits for it, and unloaded when it has been idle for a while or another one needs its
memory. Of two that do not fit together, each stays for `MIN_STAY_S` at least, so that they are served in turns. The
model that has waited longest is loaded first, and no smaller one overtakes it. An operator may load, unload, pin and
unpin a model, by the same rules.
"""  # decider

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo.base import errors

MIN_STAY_S = 30.0
RETRY_S = 30.0  # after which a model that could not be loaded is tried again
_FIRST_LOAD_S = 10.0  # of any model, before one was measured
_LOAD_S_PER_GB = 2.0
_SMOOTHING = 0.3  # weight of the newest duration of a load
Phase = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServableModel:
    """A model, the memory that it takes, and whether it stays loaded."""

    name: str
    memory_gb: float
    is_pinned: bool = False


class Demand(NamedTuple):
    """The requests for one model."""

    num_waiting: int = 0
    num_running: int = 0


class TurnDecision(NamedTuple):
    """The models to load and to unload now."""

    loads: Sequence[str]
    unloads: Sequence[str]


@dataclass(slots=True)
class _Residency:
    """The state of one model."""

    model: ServableModel
    phase: Phase = "unloaded"
    since: float = 0.0
    used_at: float = 0.0
    waiting_since: float | None = None
    is_running: bool = False
    is_load_requested: bool = False  # by an operator, until it is loaded
    is_unload_requested: bool = False
    load_s: float = 0.0
    failed_at: float = field(default=-math.inf)

    @property
    def is_in_use(self) -> bool:
        return self.is_running or self.waiting_since is not None


class ModelTurns:
    """Decides when models are loaded and unloaded; times are seconds of any clock."""

    def __init__(
        self, models: Collection[ServableModel], *, budget_gb: float, idle_s: float
    ) -> None:
        """Raise ConfigError for a model that can never be loaded."""
        self._budget_gb = budget_gb
        self._idle_s = idle_s
        self._states = {model.name: _Residency(model) for model in models}
        for state in self._states.values():
            state.load_s = _FIRST_LOAD_S + _LOAD_S_PER_GB * state.model.memory_gb
        if reason := _find_misfit(models, budget_gb):
            raise errors.ConfigError(
                f"{reason}: raise --memory-budget-gb, pin fewer, or serve a smaller one"
            )

    def is_pinned(self, name: str) -> bool:
        """Return whether the model stays loaded."""
        return self._states[name].model.is_pinned

    def request_load(self, name: str) -> None:
        """Load the model at its turn, as if a request waited for it; one that could not be loaded is tried again."""
        state = self._states[name]
        state.is_load_requested = state.phase != "loaded"
        state.is_unload_requested = False
        state.failed_at = -math.inf

    def request_unload(self, name: str, now: float) -> None:
        """Unload the model. Raises Conflict for one that is pinned, in use, loading, or was loaded just now."""
        state = self._states[name]
        stays_s = MIN_STAY_S - (now - state.since)
        if state.model.is_pinned:
            reason = "it is pinned: unpin it first"
        elif state.phase == "loading" or state.is_load_requested:
            reason = "it is being loaded"
        elif state.is_in_use:
            reason = "requests for it wait or run"
        elif state.phase == "loaded" and stays_s > 0:
            reason = f"it stays for {MIN_STAY_S:g} s, and has {math.ceil(stays_s)} s of them left"
        else:
            state.is_unload_requested = state.phase == "loaded"
            return
        raise errors.Conflict(f"{name} is not unloaded: {reason}")

    def pin(self, name: str) -> None:
        """Load the model, and keep it loaded. Raises Conflict if another one could never be loaded beside it."""
        changed = dataclasses.replace(self._states[name].model, is_pinned=True)
        others = [state.model for state in self._states.values() if state.model.name != name]
        if reason := _find_misfit([*others, changed], self._budget_gb):
            raise errors.Conflict(f"{name} is not pinned, because {reason}")
        self._states[name].model = changed
        self.request_load(name)

    def unpin(self, name: str) -> None:
        """Let the model be unloaded again."""
        state = self._states[name]
        state.model = dataclasses.replace(state.model, is_pinned=False)

    def phase_of(self, name: str) -> Phase:
        return self._states[name].phase

    def has_failed(self, name: str, now: float) -> bool:
        """Return whether the model could not be loaded a short time ago."""
        return now - self._states[name].failed_at < RETRY_S

    def decide(self, now: float, demand_by_name: Mapping[str, Demand]) -> TurnDecision:
        """Return what to load and to unload, for these requests."""
        for name, state in self._states.items():
            demand = demand_by_name.get(name, Demand())
            state.is_running = demand.num_running > 0
            if not demand.num_waiting and not state.is_load_requested:
                state.waiting_since = None
            elif state.waiting_since is None:
                state.waiting_since = now
            if state.is_in_use:
                state.used_at = now
        unloads = [state for state in self._unloadable(now) if self._is_idle(state, now)]
        loads = []
        free_gb = self._budget_gb - sum(
            state.model.memory_gb for state in self._states.values() if state.phase != "unloaded"
        )
        for state in self._queue(now):
            if state.model.memory_gb > free_gb:
                unloads += self._make_room(now, state.model.memory_gb - free_gb, unloads)
                break
            free_gb -= state.model.memory_gb
            loads.append(state.model.name)
        return TurnDecision(loads, [state.model.name for state in unloads])

    def estimate_s(self, name: str, now: float) -> float:
        """Return the seconds until a request that comes now is answered, as far as that can be known."""
        state = self._states[name]
        if state.phase == "loaded":
            return 0.0
        if state.phase == "loading":
            return max(1.0, state.load_s - (now - state.since))
        queue = self._queue(now)
        ahead = queue[: queue.index(state)] if state in queue else queue
        others = [other for other in self._states.values() if other.phase in ("loading", "loaded")]
        taken_gb = sum(other.model.memory_gb for other in (*others, *ahead, state))
        turns_s = [
            max(0.0, MIN_STAY_S - (now - other.since))
            for other in others
            if not other.model.is_pinned
        ]
        wait_s = min(turns_s, default=0.0) if taken_gb > self._budget_gb else 0.0
        return wait_s + sum(MIN_STAY_S + other.load_s for other in ahead) + state.load_s

    def record_phase(self, name: str, phase: Phase, now: float) -> None:
        """Record that a load or an unload has begun or ended."""
        state = self._states[name]
        if state.phase == "loading" and phase == "loaded":
            state.load_s += _SMOOTHING * (now - state.since - state.load_s)
        state.phase, state.since = phase, now
        state.is_load_requested &= phase == "loading"
        state.is_unload_requested = False
        state.used_at = max(state.used_at, now)

    def record_failure(self, name: str, now: float) -> None:
        """Record that the model could not be loaded, or has ended by itself."""
        self.record_phase(name, "unloaded", now)
        self._states[name].failed_at = now

    def _queue(self, now: float) -> list[_Residency]:
        """Return the models that are to be loaded, the first one first."""
        wanted = [
            state
            for state in self._states.values()
            if state.phase == "unloaded"
            and (state.model.is_pinned or state.waiting_since is not None)
            and not self.has_failed(state.model.name, now)
        ]
        return sorted(wanted, key=lambda s: (not s.model.is_pinned, s.waiting_since or 0.0))

    def _unloadable(self, now: float) -> list[_Residency]:
        """Return the models that may be unloaded: those without requests first, the longest unused first."""
        found = [
            state
            for state in self._states.values()
            if state.phase == "loaded"
            and not state.model.is_pinned
            and now - state.since >= MIN_STAY_S
        ]
        return sorted(found, key=lambda state: (state.is_in_use, state.used_at, state.since))

    def _is_idle(self, state: _Residency, now: float) -> bool:
        is_over = state.is_unload_requested or now - state.used_at >= self._idle_s
        return not state.is_in_use and is_over

    def _make_room(
        self, now: float, missing_gb: float, unloads: Sequence[_Residency]
    ) -> list[_Residency]:
        """Return the models to unload for one that lacks so much memory, beside those that are unloaded already."""
        leaving = [state for state in self._states.values() if state.phase == "unloading"]
        missing_gb -= sum(state.model.memory_gb for state in (*leaving, *unloads))
        chosen: list[_Residency] = []
        for state in self._unloadable(now):
            if missing_gb <= 0:
                break
            if state not in unloads:
                chosen.append(state)
                missing_gb -= state.model.memory_gb
        return chosen if missing_gb <= 0 else []


def _find_misfit(models: Collection[ServableModel], budget_gb: float) -> str:
    """Return which model could never be loaded beside the pinned ones, and why; "" if all can."""
    pinned_gb = sum(model.memory_gb for model in models if model.is_pinned)
    for model in models:
        needed_gb = pinned_gb + (0 if model.is_pinned else model.memory_gb)
        if needed_gb > budget_gb:
            beside = f", and the pinned models {pinned_gb:.1f} GB" if pinned_gb else ""
            return (
                f"{model.name} can never be loaded: it takes about {model.memory_gb:.1f} GB{beside}, of"
                f" {budget_gb:.1f} GB for all"
            )
    return ""
