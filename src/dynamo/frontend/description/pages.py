"""The two routes that describe all routes. The document is made when it is first asked for: few ever do."""

import functools
from typing import Any

from dynamo.base import distribution
from dynamo.frontend import operations
from dynamo.frontend.answer import sse
from dynamo.frontend.description import docs_page, field_details, openapi
from dynamo.runtime.http import exchange


class Description:
    """Answers `GET /openapi.json` and `GET /docs`."""

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """OpenAPI's."""
        version = distribution.version()
        return openapi.document(operations.OPERATIONS, field_details.DETAILS, version)

    def show(self, caller: exchange.Exchange) -> None:
        """For programs."""
        caller.respond(200, sse.encode(self.document))

    def show_page(self, caller: exchange.Exchange, model: str) -> None:
        """For people; `model` stands in the examples."""
        host = caller.request.headers.get("host", "")
        page = docs_page.page(self.document, operations.OPERATIONS, host=host, model=model)
        kind = "text/html; charset=utf-8"
        caller.respond(200, page, content_type=kind, headers=docs_page.SECURITY)
