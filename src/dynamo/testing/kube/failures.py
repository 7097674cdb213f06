"""Refusals of the API server, each as the Status object that a real one answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.testing.kube import resources

Object = dict[str, Any]


class ApiError(Exception):
    """A request that is refused, with the HTTP status, reason and details of the answer."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.headers = tuple(headers)
        self.body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
        }
        if reason:
            self.body["reason"] = reason
        if details is not None:
            self.body["details"] = dict(details)
        self.body["code"] = code


@dataclass(frozen=True, slots=True)
class FieldError:
    """A mistake in one field, in the words of the API server."""

    reason: str
    field: str
    message: str

    @property
    def cause(self) -> Object:
        """The entry of a Status object's list of causes."""
        return {"reason": self.reason, "message": self.message, "field": self.field}


def required(field: str, message: str = "") -> FieldError:
    """Return the error of a field that must be there."""
    return FieldError(
        "FieldValueRequired", field, "Required value" + (f": {message}" if message else "")
    )


def invalid_value(field: str, shown: str, message: str) -> FieldError:
    """Return the error of a field with a wrong value; `shown` is the value as JSON."""
    return FieldError("FieldValueInvalid", field, f"Invalid value: {shown}: {message}")


def unsupported(field: str, shown: str, choices: str) -> FieldError:
    """Return the error of a field whose value is none of the choices; both are shown as JSON."""
    message = f"Unsupported value: {shown}: supported values: {choices}"
    return FieldError("FieldValueNotSupported", field, message)


def duplicate(field: str, shown: str) -> FieldError:
    """Return the error of a value that another item of the same list has; `shown` is the value as JSON."""
    return FieldError("FieldValueDuplicate", field, f"Duplicate value: {shown}")


def forbidden_value(field: str, message: str) -> FieldError:
    """Return the error of a field that may not be set here."""
    return FieldError("FieldValueForbidden", field, f"Forbidden: {message}")


def _details(resource: resources.ApiResource, name: str) -> Object:
    details: Object = {"name": name} if name else {}
    if resource.group:
        details["group"] = resource.group
    return {**details, "kind": resource.plural}


def not_found(resource: resources.ApiResource, name: str) -> ApiError:
    """Return the answer for an object that does not exist."""
    message = f'{resource.qualified_plural} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(resource, name))


def already_exists(resource: resources.ApiResource, name: str) -> ApiError:
    """Return the answer for an object that exists."""
    message = f'{resource.qualified_plural} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(resource, name))


_STALE = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def conflict(resource: resources.ApiResource, name: str, why: str = _STALE) -> ApiError:
    """Return the answer for a write that is based on an older version."""
    message = f'Operation cannot be fulfilled on {resource.qualified_plural} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(resource, name))


def unmet_precondition(resource: resources.ApiResource, name: str, why: str) -> ApiError:
    """Return the answer for a deletion that is meant for another version; it names the kind, not the resource."""
    message = f'Operation cannot be fulfilled on {resource.qualified_kind} "{name}": {why}'
    return ApiError(409, "Conflict", message, {**_details(resource, name), "kind": resource.kind})


def is_stale(error: ApiError) -> bool:
    """Return True for the answer to a write that is based on an older version, not to one of another's field."""
    return bool(error.body.get("reason") == "Conflict" and error.body["message"].endswith(_STALE))


def invalid(qualified_kind: str, name: str, errors: Sequence[FieldError]) -> ApiError:
    """Return the answer for an object with mistakes in its fields; `qualified_kind` is Kind.group."""
    texts = list(dict.fromkeys(f"{error.field}: {error.message}" for error in errors))
    text = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    kind, _, group = qualified_kind.partition(".")
    details: Object = {"name": name} if name else {}
    if group:
        details["group"] = group
    if kind:
        details["kind"] = kind
    details["causes"] = [error.cause for error in errors]
    return ApiError(422, "Invalid", f'{qualified_kind} "{name}" is invalid: {text}', details)


def not_allowed(resource: resources.ApiResource, verb: str) -> ApiError:
    """Return the answer for a method that a resource does not take."""
    if not resource.is_custom:
        text = "the server does not allow this method on the requested resource"
        return ApiError(405, "MethodNotAllowed", text, {})
    text = f'{verb} is not supported on resources of kind "{resource.qualified_plural}"'
    return ApiError(405, "MethodNotAllowed", text, _details(resource, ""))


def bad_request(message: str) -> ApiError:
    """Return the answer for a request that cannot be understood."""
    return ApiError(400, "BadRequest", message)


def undecodable(resource: resources.ApiResource, why: str) -> ApiError:
    """Return the answer for a body that is no object of this kind."""
    kind = resource.kind
    return bad_request(
        f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}'
    )


def forbidden(resource: resources.ApiResource, name: str, why: str) -> ApiError:
    """Return the answer for a request that admission refuses."""
    message = f'{resource.qualified_plural} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, _details(resource, name))


def success(details: Mapping[str, Any] | None = None) -> Object:
    """Return the answer for what was done and leaves no object."""
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return {**body, "details": dict(details)} if details is not None else body


def expired(message: str) -> ApiError:
    """Return the answer for a resource version that is no longer kept."""
    return ApiError(410, "Expired", message)


def internal(message: str) -> ApiError:
    """Return the answer for an error inside the server."""
    details = {"causes": [{"message": message}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {message}", details)
