"""The policy of restarting a process that died: each time after a longer pause, and not for ever."""

FIRST_PAUSE_S = 0.5  # doubled each time
MAX_RESTARTS = 5
STABLE_S = 60.0  # a process that ran longer starts with the first pause again


class RestartPolicy:
    """Counts the deaths of one process."""

    def __init__(self) -> None:
        self._num_restarts = 0

    def pause_s(self, ran_s: float) -> float | None:
        """Return the seconds to wait before the next start of a process that ran `ran_s`; None to give up."""
        if ran_s > STABLE_S:
            self._num_restarts = 0
        if self._num_restarts == MAX_RESTARTS:
            return None
        self._num_restarts += 1
        return FIRST_PAUSE_S * 2.0 ** (self._num_restarts - 1)
