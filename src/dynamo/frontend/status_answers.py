"""What a frontend answers of itself, as types: for the description of our API, like `protocols.openai_answers`."""

from typing import Any, Literal

import msgspec


class Live(msgspec.Struct, kw_only=True):
    """The process lives."""

    status: Literal["live"]
    message: str


class Healthy(msgspec.Struct, kw_only=True):
    """Somebody can answer."""

    status: Literal["healthy"]
    endpoints: list[str]
    instances: list[dict[str, Any]]


class Unhealthy(msgspec.Struct, kw_only=True):
    """Nobody can."""

    status: Literal["unhealthy"]
    message: str
    instances: list[dict[str, Any]]


class ClearedWorker(msgspec.Struct, kw_only=True):
    """What one worker said."""

    name: str
    endpoint: str
    status: str
    response: dict[str, Any] | None


class Cleared(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What all said; only a message if there is nobody."""

    cleared_workers: list[ClearedWorker] = []
    failed_workers: list[ClearedWorker] = []
    message: str = ""


class ModelThresholds(msgspec.Struct, kw_only=True):
    """From when on a worker of this model counts as busy; null: never."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None


class AllThresholds(msgspec.Struct, kw_only=True):
    """Those of all models."""

    thresholds: list[ModelThresholds]
