"""A line for each request that has ended, for whoever reads logs at `debug`; at `info` a request makes none.

DYN_LOG=info,dynamo.frontend.records.request_log=debug
"""

import logging

from dynamo.frontend import metrics
from dynamo.observability import logs

_logger = logging.getLogger(__name__)


class RequestLog:
    """Observes requests."""

    def ended(self, request: metrics.RequestMeter) -> None:
        """It is over."""
        arrival = request.arrival
        token = logs.about.set(logs.Subject("http-request", arrival.told_id, arrival.trace))
        _logger.debug(
            "%s of %s: %s, %d tokens in %.3f s",
            request.endpoint,
            request.model.label,
            request.error_type or "success",
            request.num_tokens,
            (request.ended_at or arrival.at) - arrival.at,
        )
        logs.about.reset(token)


def is_wanted() -> bool:
    """Asked once, at start."""
    return _logger.isEnabledFor(logging.DEBUG)
