"""Errors in the form of each API, with its status."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
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
    assert error_dialects.OPENAI.status_of(error) == status
    assert json.loads(error_dialects.OPENAI.body_of(error)) == {
        "error": {"message": "no", "type": kind, "param": None, "code": code}
    }


def test_error_names_the_field():
    body = json.loads(error_dialects.OPENAI.body_of(errors.InvalidRequest("no", param="n")))

    assert body["error"]["param"] == "n"


def test_unexpected_exception_has_the_same_error_format():
    body = json.loads(error_dialects.OPENAI.refusal(404, "no such path"))

    assert body == {
        "error": {
            "message": "no such path",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidRequest("x", param="p"), 400, "invalid_request_error"),
        (model_errors.ModelNotFound("x"), 404, "not_found_error"),
        (errors.Overloaded("x"), 529, "overloaded_error"),
        (errors.NoWorkers("x"), 503, "api_error"),
        (errors.StreamBroken("x"), 503, "api_error"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error"),
        (errors.EngineFailed("x"), 500, "api_error"),
    ],
)
def test_error_class_decides_status_and_type_at_anthropic(error, status, kind):
    assert error_dialects.ANTHROPIC.status_of(error) == status
    assert json.loads(error_dialects.ANTHROPIC.body_of(error)) == {
        "type": "error",
        "error": {"type": kind, "message": "x"},
    }


def test_prompt_that_is_too_long_is_called_so_as_by_anthropic():
    body = json.loads(error_dialects.ANTHROPIC.body_of(model_errors.ContextTooLong("x")))

    assert error_dialects.ANTHROPIC.status_of(model_errors.ContextTooLong("x")) == 400
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: x",
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
def test_status_of_a_server_refusal_decides_anthropics_error_type(status, kind):
    assert json.loads(error_dialects.ANTHROPIC.refusal(status, "x"))["error"]["type"] == kind


def test_kserve_error_is_a_sentence_with_openais_status():
    error = model_errors.ModelNotFound("no such model")

    assert error_dialects.KSERVE.status_of(error) == 404
    assert json.loads(error_dialects.KSERVE.body_of(error)) == {"error": "no such model"}
