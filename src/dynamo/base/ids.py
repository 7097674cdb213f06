"""Identifiers, as types, and how new ones are made."""

import os
import random
import secrets
from typing import NewType

InstanceId = NewType("InstanceId", int)
"""A registered process; positive, below 2**63, written as hexadecimal digits in keys."""

RequestId = NewType("RequestId", str)
"""One request of a client, from the HTTP door to the engine."""


def new_instance_id() -> InstanceId:
    """A random id; never 0, so that 0 cannot be mistaken for one."""
    return InstanceId(secrets.randbits(62) + 1)


def new_request_id() -> RequestId:
    """A UUID of version 4 (RFC 9562) from the system's secure generator; `uuid` takes twice the time."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return RequestId(
        f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
    )


def new_tool_call_id() -> str:
    """Nine letters and digits: the templates of Mistral's models refuse any other length."""
    return secrets.token_hex(5)[:9]


def new_trace_id() -> str:
    """32 hexadecimal digits, not all zero (W3C Trace Context). No secret, so the fast generator will do."""
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """16 hexadecimal digits, likewise."""
    return f"{random.getrandbits(64) or 1:016x}"
