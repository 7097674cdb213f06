"""Errors of requests to language models, added to the tree of `base.errors`; they cross the wire like the others.

DynamoError
├── RequestError
│   ├── ContextTooLong           prompt and requested answer exceed the context     400
│   ├── ModelNotFound            no worker serves a model of this name              404
│   └── ResponseNotFound         the stored response to continue from is not kept   400
└── SuspectRequest           workers died while they had it: ask no other       500
"""

from dynamo.base import errors


class ContextTooLong(errors.RequestError):
    """The prompt, or the prompt and the requested answer, exceed the context length of the model."""

    code = "context_length_exceeded"


class ModelNotFound(errors.RequestError):
    """No worker serves a model of this name."""

    code = "model_not_found"


class ResponseNotFound(errors.RequestError):
    """The stored response to continue from is not kept, or not any more."""

    code = "previous_response_not_found"


class SuspectRequest(errors.DynamoError):
    """Workers died while they had the request, so that no other gets it."""

    code = "suspect_request"
