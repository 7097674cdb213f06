"""Errors in OpenAI's shape, with OpenAI's status."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis import openai_errors
from dynamo.protocols import model_errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("no"), 400, "invalid_request_error", "invalid_request"),
        (
            model_errors.ContextTooLong("no"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (model_errors.ModelNotFound("no"), 404, "invalid_request_error", "model_not_found"),
        (errors.Cancelled("no"), 499, "request_cancelled", "cancelled"),
        (errors.Overloaded("no"), 503, "service_unavailable", "overloaded"),
        (errors.NoWorkers("no"), 503, "service_unavailable", "no_workers"),
        (errors.StreamBroken("no"), 503, "service_unavailable", "stream_broken"),
        (errors.DeadlineExceeded("no"), 504, "timeout", "deadline_exceeded"),
        (errors.EngineFailed("no"), 500, "server_error", "engine_failed"),
        (errors.RemoteProtocolError("no"), 500, "server_error", "remote_protocol"),
        (errors.DynamoError("no"), 500, "server_error", "internal"),
    ],
)
def test_each_error_has_a_status_and_a_name(error, status, kind, code):
    assert openai_errors.status_of(error) == status
    assert json.loads(openai_errors.body_of(error)) == {
        "error": {"message": "no", "type": kind, "param": None, "code": code}
    }


def test_error_names_the_field():
    body = json.loads(openai_errors.body_of(errors.InvalidRequest("no", param="n")))

    assert body["error"]["param"] == "n"


def test_unexpected_exception_has_the_same_error_format():
    body = json.loads(openai_errors.encode("no such path", type="invalid_request_error"))

    assert body == {
        "error": {
            "message": "no such path",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }
