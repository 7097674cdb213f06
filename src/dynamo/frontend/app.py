"""The HTTP application of a frontend: the operations of all APIs, and the routes made from them.

A new API is one module or folder in `apis` and one line in `_APIS`.
"""

import functools

from dynamo.frontend.admission import load_thresholds
from dynamo.frontend.apis import (
    chat,
    completions,
    description,
    embeddings,
    error_dialects,
    files,
    models,
    operation,
    scores,
    status,
    tokenize,
)
from dynamo.frontend.apis.console import api as console
from dynamo.frontend.apis.kserve import api as kserve
from dynamo.frontend.apis.messages import api as messages
from dynamo.frontend.apis.ollama import api as ollama
from dynamo.frontend.apis.responses import api as responses
from dynamo.frontend.delivery import delivery
from dynamo.frontend.processes import peers
from dynamo.runtime.http import exchange

_APIS = (
    chat.operations,
    completions.operations,
    responses.operations,
    models.operations,
    messages.operations,
    embeddings.operations,
    scores.operations,
    files.operations,
    kserve.operations,
    ollama.operations,
    tokenize.operations,
    status.operations,
    console.operations,
)


class App:
    """The routes of one frontend, for its clients and for its sibling processes."""

    def __init__(self, context: operation.ApiContext) -> None:
        self._drain_state = context.drain_state
        self._feed = context.console.feed
        apis = [entry for operations in _APIS for entry in operations(context)]
        self.operations = (*apis, *description.operations(context, apis))
        # the paths of an API with errors of its own, for requests that no handler takes
        self._dialect_by_prefix = {
            entry.path.partition(operation.ANY_ID)[0]: entry.dialect
            for entry in self.operations
            if entry.dialect is not error_dialects.OPENAI
        }
        self._body_factor_by_path = {entry.path: entry.body_factor for entry in self.operations}
        self.routes = exchange.HttpRouter(
            {(entry.method, entry.path): entry.handler for entry in self.operations},
            error_body=self.error_body,
        )
        self.sibling_routes: peers.PeerRoutes = {
            ("GET", "/metrics"): status.metrics_handler(context),
            ("POST", "/busy_threshold"): context.compute(
                load_thresholds.decode_change, context.admission.thresholds.change
            ),
            ("GET", console.USAGE): functools.partial(console.answer_usage, context),
            **context.shared_responses.routes,
        }

    def body_factor_of(self, path: str) -> int:
        """Return by which factor a body may be larger at this path than at others."""
        return self._body_factor_by_path.get(path, 1)

    def start_draining(self) -> None:
        """Refuse new requests from now on, and end what would go on for ever."""
        self._drain_state.is_draining = True
        self._feed.end_all()

    def error_body(self, status: int, message: str, path: str) -> bytes:
        """Return the body of an error that the HTTP server itself answers at this path."""
        return self.dialect_of(path).refusal(status, message)

    def dialect_of(self, path: str) -> delivery.ErrorDialect:
        """Return how the API at this path encodes errors."""
        for prefix, dialect in self._dialect_by_prefix.items():
            if path.startswith(prefix):
                return dialect
        return error_dialects.OPENAI
