"""Errors of requests to language models, added to the tree of `base.errors`; they cross the wire like the others.

DynamoError
├── RequestError
│   ├── ContextTooLong           prompt and requested answer exceed the context     400
│   ├── ModelNotFound            no worker serves a model of this name              404
│   ├── ObjectNotFound           there is no such file or batch                     404
│   └── ResponseNotFound         the stored response to continue from is not kept   400
└── SuspectRequest           workers died while they had it: ask no other       500
"""

import re

from dynamo.base import errors


class ContextTooLong(errors.RequestError):
    """The prompt, or the prompt and the requested answer, exceed the context length of the model."""

    code = "context_length_exceeded"


class ModelNotFound(errors.RequestError):
    """No worker serves a model of this name."""

    code = "model_not_found"


class ObjectNotFound(errors.RequestError):
    """There is no file or batch of this id, or it belongs to another tenant."""

    code = "not_found"


class ResponseNotFound(errors.RequestError):
    """The stored response to continue from is not kept, or not any more."""

    code = "previous_response_not_found"


class SuspectRequest(errors.DynamoError):
    """Workers died while they had the request, so that no other gets it."""

    code = "suspect_request"


_START = r"(?<![\w-])(?<![\w-]\.)"  # of a name: a long message is not read again from each middle
_INNER_NAMES = re.compile(
    r"(?<![\w+])[a-z0-9+]++://[^\s'\",;]+"  # URLs
    r"|\[[0-9a-fA-F:.]+\](?::\d+)?|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?"  # addresses, with or without a port
    r"|(?<![\w.:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])"  # of IPv6, without brackets
    rf"|{_START}[\w-]++(?:\.[\w-]++)*+:\d{{2,5}}\b"  # names with a port
    rf"|{_START}[\w-]++(?:\.[\w-]++)*\.(?:internal|local|localdomain|lan|svc)\b\.?"  # of private domains
    rf"|{_START}[\w-]++(?:\.[\w-]++)+\.[A-Za-z]{{2,}}\b"  # of three parts, without a port
    r"|(?<=not valid for ')[^']+"  # the name in OpenSSL's words for a certificate of another host
    r"|(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*"  # absolute paths
)


def client_message(error: errors.DynamoError) -> str:
    """Return the message for a client; where the fault is ours, without addresses and paths, which the log has."""
    text = str(error)
    return text if isinstance(error, errors.RequestError) else _INNER_NAMES.sub("…", text)
