"""One request to the API server: what its path, query and body say, and how it is answered."""

import json
from typing import Any
from urllib.parse import parse_qs

import yaml

from dynamo.runtime.http import exchange as exchanges
from dynamo.testing.kube import api, failures, protobuf, resources, rights

Object = dict[str, Any]


class Query:
    """The query parameters of a request."""

    def __init__(self, text: str) -> None:
        self._values = parse_qs(text, keep_blank_values=True)

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a parameter."""
        return self._values.get(name, [default])[0]

    def all(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return self._values.get(name, [])

    def flag(self, name: str) -> bool:
        """Return whether a parameter is set; only false and 0 are not."""
        return name in self._values and self.get(name) not in ("false", "0")

    def number(self, name: str) -> int | None:
        """Return a whole number, or None. Raises ApiError (400)."""
        text = self.get(name)
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            message = f'strconv.ParseInt: parsing "{text}": invalid syntax'
            raise failures.bad_request(message) from None


class ApiCall:
    """One request to a resource, with what its path and query say."""

    def __init__(self, exchange: exchanges.Exchange) -> None:
        self.exchange = exchange
        self.request = exchange.request
        self.query = Query(exchange.request.query)
        self.namespace = self.name = self.subresource = ""
        self.user = rights.ANONYMOUS
        self.warnings: list[str] = []

    @property
    def accept(self) -> str:
        """The media types that the client takes."""
        return self.request.headers.get("accept", "")

    def respond(self, status: int, body: Any) -> None:
        """Answer with an object, as YAML if the client asks for it first."""
        headers = [("warning", f"299 - {json.dumps(text)}") for text in self.warnings]
        if self.accept.startswith("application/yaml"):
            text = yaml.safe_dump(body, sort_keys=False).encode()
            self.exchange.respond(status, text, content_type="application/yaml", headers=headers)
            return
        is_pretty = self.query.flag("pretty") or self.request.headers.get(
            "user-agent", ""
        ).startswith("curl/")
        text = json.dumps(body, indent=2) if is_pretty else json.dumps(body, separators=(",", ":"))
        self.exchange.respond(status, text.encode(), headers=headers)

    def decode(self, resource: "resources.ApiResource") -> Any:
        """Return the body. Raises ApiError (400, 415)."""
        media_type = self.request.headers.get("content-type", "").partition(";")[0].strip()
        if media_type == protobuf.MEDIA_TYPE:
            return protobuf.decode(self.request.body, resource.api_version, resource.kind)
        if "yaml" in media_type:
            try:
                return yaml.safe_load(self.request.body)
            except yaml.YAMLError as error:
                raise failures.bad_request(f"error decoding YAML: {error}") from error
        try:
            return json.loads(self.request.body or b"")
        except ValueError:
            text = self.request.body.decode("utf-8", "replace")
            if "patch" in media_type:
                message = "error decoding patch: unexpected end of JSON input"
            else:
                message = (
                    f"the object provided is unrecognized (must be of type {resource.kind}): "
                    "couldn't get version/kind; json parse error: unexpected end of JSON "
                    f"input ({text.encode().hex()[:20]} ...)"
                )
            raise failures.bad_request(message) from None

    def write_options(self) -> api.WriteOptions:
        """Return the options of a write. Raises ApiError (422)."""
        manager = self.query.get("fieldManager")
        if len(manager) > 128:
            error = failures.FieldError(
                "FieldValueTooLong", "fieldManager", "Too long: may not be more than 128 bytes"
            )
            raise failures.invalid("PatchOptions.meta.k8s.io", "", [error])
        agent = self.request.headers.get("user-agent", "").partition("/")[0]
        return api.WriteOptions(
            manager=manager or agent or "unknown",
            user=self.user,
            is_dry_run=self.query.get("dryRun") == "All",
            is_forced=self.query.flag("force"),
            field_validation=self.query.get("fieldValidation") or "Warn",
            subresource=self.subresource,
            warnings=self.warnings,
        )
