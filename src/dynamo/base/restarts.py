"""When a process that died is started again: each time a little later, and not for ever."""

FIRST_PAUSE_S = 0.5  # doubled each time
MAX_RESTARTS = 5
STABLE_S = 60.0  # who lived so long may die anew


class Restarts:
    """The deaths of one process."""

    def __init__(self) -> None:
        self._num_restarts = 0

    def pause_s(self, lived_s: float) -> float | None:
        """It died after `lived_s`: how long to wait before the next start; None to give up."""
        if lived_s > STABLE_S:
            self._num_restarts = 0
        if self._num_restarts == MAX_RESTARTS:
            return None
        self._num_restarts += 1
        return FIRST_PAUSE_S * 2.0 ** (self._num_restarts - 1)
