"""One request to the API server: what its path, query and body say, and how it is answered."""

import json
import re
from typing import Any
from urllib.parse import parse_qs

import yaml

from dynamo.runtime.http import exchange as exchanges
from dynamo.testing.kube import api, failures, protobuf, resources, rights

Object = dict[str, Any]
ACCEPTED = "application/json, application/yaml, application/vnd.kubernetes.protobuf"


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


def _with_whole_numbers(value: Any) -> Any:
    """Return a value with whole numbers for such as 1.0, as YAML is converted to JSON."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ApiCall:
    """One request to a resource, with what its path and query say."""

    def __init__(self, exchange: exchanges.Exchange) -> None:
        self.exchange = exchange
        self.request = exchange.request
        self.query = Query(exchange.request.query)
        self.namespace = self.name = self.subresource = ""
        self.user = rights.ANONYMOUS
        self.warnings: list[str] = []

    def check_timeout(self) -> None:
        """Refuse a `timeout` that is no duration. Raises ApiError (400)."""
        timeout = self.query.get("timeout")
        if timeout and not re.fullmatch(r"([\d.]+(ns|us|µs|ms|s|m|h))+|0", timeout):
            text = (
                f'invalid timeout specified in the request URL - time: invalid duration "{timeout}"'
            )
            raise failures.bad_request(text)

    def _check_choices(self) -> None:
        """Refuse values of parameters that mean nothing. Raises ApiError (422)."""
        findings = []
        validation = self.query.get("fieldValidation")
        if any(value != "All" for value in self.query.all("dryRun")):
            shown = json.dumps(self.query.all("dryRun"))
            findings.append(failures.unsupported("dryRun", shown, '"All"'))
        if validation not in ("", "Ignore", "Strict", "Warn"):
            choices = '"", "Ignore", "Strict", "Warn"'
            findings.append(failures.unsupported("fieldValidation", f'"{validation}"', choices))
        if findings:
            kind = {"POST": "Create", "PUT": "Update"}.get(self.request.method, "Patch")
            raise failures.invalid(f"{kind}Options.meta.k8s.io", "", findings)

    @property
    def media_type(self) -> str:
        return self.request.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def accept(self) -> str:
        """The media types that the client takes."""
        return self.request.headers.get("accept", "")

    @property
    def warning_headers(self) -> list[tuple[str, str]]:
        """The headers by which a client is told of the warnings."""
        return [("warning", f"299 - {json.dumps(text)}") for text in self.warnings]

    def respond(self, status: int, body: Any) -> None:
        """Answer with an object, as YAML if the client asks for it first."""
        headers = self.warning_headers
        if self.accept.startswith("application/yaml"):
            text = yaml.safe_dump(body, sort_keys=False).encode()
            self.exchange.respond(status, text, content_type="application/yaml", headers=headers)
            return
        is_pretty = self.query.flag("pretty") or self.request.headers.get(
            "user-agent", ""
        ).startswith("curl/")
        text = json.dumps(body, indent=2) if is_pretty else json.dumps(body, separators=(",", ":"))
        self.exchange.respond(status, text.encode(), headers=headers)

    def decode(self, resource: resources.ApiResource) -> Any:
        """Return the body. Raises ApiError (400, 415)."""
        media_type, body = self.media_type, self.request.body
        if media_type == protobuf.MEDIA_TYPE:
            return protobuf.decode(body, resource.api_version, resource.kind)
        if self.request.method in ("POST", "PUT") and "text/" in media_type:
            text = (
                "the body of the request was in an unknown format - accepted media types include: "
            )
            raise failures.ApiError(415, "UnsupportedMediaType", text + ACCEPTED)
        try:
            if "yaml" in media_type:
                loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
                return _with_whole_numbers(yaml.load(body, loader))
            return json.loads(body)
        except yaml.MarkedYAMLError as error:
            line = (error.problem_mark.line if error.problem_mark else 0) or 1
            mistake = f"yaml: line {line}: {error.problem}"
        except (yaml.YAMLError, ValueError):
            mistake = "couldn't get version/kind; json parse error: unexpected end of JSON input"
        if "patch" not in media_type:
            raise self.unrecognized(resource, mistake)
        text = "error decoding patch: unexpected end of JSON input"
        if "yaml" in media_type:
            text = f"error decoding YAML: error converting YAML to JSON: {mistake}"
        raise failures.bad_request(text)

    def unrecognized(self, resource: resources.ApiResource, mistake: str) -> failures.ApiError:
        """Return the refusal of a body that is no object, with the begin of the body."""
        body = self.request.body
        shown = body[:30].decode("utf-8", "replace") if body[:1] == b"{" else body[:30].hex()
        shown += " ..." if len(body) > 30 else ""
        return failures.bad_request(
            f"the object provided is unrecognized (must be of type {resource.kind}): {mistake} ({shown or '<empty>'})"
        )

    def write_options(self) -> api.WriteOptions:
        """Return the options of a write. Raises ApiError (422)."""
        manager = self.query.get("fieldManager")
        if len(manager) > 128:
            error = failures.FieldError(
                "FieldValueTooLong", "fieldManager", "Too long: may not be more than 128 bytes"
            )
            raise failures.invalid("PatchOptions.meta.k8s.io", "", [error])
        self._check_choices()
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
