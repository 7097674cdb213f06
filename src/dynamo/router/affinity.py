"""Which worker the requests of a conversation go to: the one that had its last request, for as long as it is recent.

Bounded: the sessions that were used longest ago are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Container

from dynamo.router import api

MAX_SESSIONS = 100_000


class SessionAffinity:
    """Session id to worker, for `ttl_s` after the last request."""

    def __init__(self, ttl_s: float, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._worker_by_session: OrderedDict[str, tuple[api.Worker, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker_by_session)

    def worker_of(
        self, session_id: str, living: Container[api.Worker], now: float
    ) -> api.Worker | None:
        """The session's worker, if it has one that lives and was used within the time to live."""
        worker, expires_at = self._worker_by_session.get(session_id, (None, 0.0))
        if worker is None or expires_at <= now or worker not in living:
            return None
        return worker

    def remember(self, session_id: str, worker: api.Worker, now: float) -> None:
        """A request of the session went to this worker."""
        self._worker_by_session[session_id] = worker, now + self._ttl_s
        self._worker_by_session.move_to_end(session_id)
        if len(self._worker_by_session) > self._max_sessions:
            self._worker_by_session.popitem(last=False)
