"""Parameters that no request of ours has: accepted and named in a header of the answer, or refused.

Clients send parameters of other servers, and of later versions of an API. What a server does not know cannot be judged,
so it is left out, and named in a header of the answer, counted, and logged once per name.
"""

import logging
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from dynamo.observability import metrics
from dynamo.runtime.http import exchange, json_body

HEADER = "x-dynamo-ignored-parameters"
MAX_SHOWN = 20  # names in a header
MAX_KNOWN = 1000  # names that are remembered so that each is logged once
_MAX_CHARS = 100
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # in a header's list of names: blanks, commas, controls
_logger = logging.getLogger(__name__)
T = TypeVar("T")


class UnknownParameters:
    """Decodes requests, and reports the parameters that they have and our types have not."""

    def __init__(self, registry: metrics.Registry, *, refuses: bool) -> None:
        self._refuses = refuses
        self._num_ignored = registry.counter(
            "ignored_parameters_total", "Unknown parameters of requests, which had no effect"
        )
        self._logged: set[str] = set()

    async def decode(
        self, client: exchange.Exchange, decode: Callable[[bytes], T], body: bytes | None = None
    ) -> T:
        """Return the client's decoded body, or this one in its place. Raises InvalidRequest."""
        names: list[str] = []

        def decode_noting(body: bytes) -> T:
            token = json_body.ignored_names.set(None if self._refuses else names)
            try:
                return decode(body)
            finally:
                json_body.ignored_names.reset(token)

        if body is None:
            decoded = await client.decode_body(decode_noting)
        else:
            decoded = await exchange.decode_apart(body, decode_noting)
        if names:
            self._report(client, [_UNPRINTABLE.sub("?", name[:_MAX_CHARS]) for name in names])
        return decoded

    def _report(self, client: exchange.Exchange, names: Sequence[str]) -> None:
        shown = ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
        client.headers = (*client.headers, (HEADER, shown))
        self._num_ignored.inc(len(names))
        if len(self._logged) < MAX_KNOWN and not self._logged.issuperset(names[:MAX_SHOWN]):
            self._logged.update(names[:MAX_SHOWN])
            path = client.request.path
            _logger.info("ignored parameters that %s does not know: %s", path, shown)
