"""The parts of `nvext`, the extensions that the original keeps in a field of their own.

They speak of the system below the API: who shall answer, how urgent it is, what conversation it belongs to.
"""

from typing import Annotated, Literal

import msgspec

InstanceId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Annotation = Literal[
    "request_id", "formatted_prompt", "token_ids", "llm_metrics", "query_instance_id"
]
ExtraField = Literal["worker_id", "timing"]


class AgentHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent knows of its request beforehand."""

    priority: Priority | None = None  # the higher is served first
    osl: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None  # tokens that will come
    # refused, unless they ask for nothing
    strict_priority: None = None
    speculative_prefill: None = None


class AgentContext(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which run of which agent asks."""

    session_type_id: str | None = None
    session_id: SessionId | None = None
    trajectory_id: str | None = None
    parent_trajectory_id: str | None = None
    trajectory_final: bool | None = None


class SessionControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conversation that a request belongs to."""

    session_id: SessionId
    action: Literal["bind"] | None = None
    timeout: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None  # seconds


TokenData = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]], msgspec.Meta(min_length=1)
]
