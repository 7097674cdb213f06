"""Errors in Anthropic's shape."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis.messages import errors as anthropic_errors
from dynamo.protocols import model_errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidRequest("x", param="p"), 400, "invalid_request_error"),
        (model_errors.ContextTooLong("x"), 400, "invalid_request_error"),
        (model_errors.ModelNotFound("x"), 404, "not_found_error"),
        (errors.Overloaded("x"), 529, "overloaded_error"),
        (errors.NoWorkers("x"), 503, "api_error"),
        (errors.StreamBroken("x"), 503, "api_error"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error"),
        (errors.EngineFailed("x"), 500, "api_error"),
    ],
)
def test_error_class_decides_status_and_type(error, status, kind):
    assert anthropic_errors.status_of(error) == status
    assert json.loads(anthropic_errors.body_of(error)) == {
        "type": "error",
        "error": {"type": kind, "message": "x"},
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (500, "api_error"),
    ],
)
def test_status_of_a_server_refusal_decides_the_error_type(status, kind):
    assert json.loads(anthropic_errors.refusal(status, "x"))["error"]["type"] == kind
