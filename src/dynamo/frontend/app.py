"""The HTTP application of a frontend: the routes that are made from the operations of all APIs."""

from collections.abc import Sequence

from dynamo.frontend.apis import error_dialects, operation
from dynamo.frontend.delivery import delivery
from dynamo.runtime.http import exchange


class App:
    """The routes of one frontend for its clients."""

    def __init__(self, operations: Sequence[operation.Operation]) -> None:
        self.operations = operations
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

    def body_factor_of(self, path: str) -> int:
        """Return by which factor a body may be larger at this path than at others."""
        return self._body_factor_by_path.get(path, 1)

    def error_body(self, status: int, message: str, path: str) -> bytes:
        """Return the body of an error that the HTTP server itself answers at this path."""
        return self.dialect_of(path).refusal(status, message)

    def dialect_of(self, path: str) -> delivery.ErrorDialect:
        """Return how the API at this path encodes errors."""
        for prefix, dialect in self._dialect_by_prefix.items():
            if path.startswith(prefix):
                return dialect
        return error_dialects.OPENAI
