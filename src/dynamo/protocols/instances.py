"""The records of discovery: which process serves which endpoint, and at which address.

    instance key      v1/instances/{namespace}/{component}/{endpoint}/{instance id, hexadecimal}
    model card key    v1/mdc/{namespace}/{component}/{endpoint}/{instance id, hexadecimal}
    start of a worker v1/starts/{instance id, hexadecimal}
    frontend          v1/frontends/{instance id, hexadecimal}
    event channel     v1/event_channels/{namespace}/{component}/{event}/{instance id, hexadecimal}

An endpoint is written `dyn://namespace.component.endpoint`.
"""

import re
from typing import Literal

import msgspec

from dynamo.base import errors

INSTANCES = "v1/instances/"
CARDS = "v1/mdc/"
STARTS = "v1/starts/"  # of workers that load their model, with a `WorkerStart`
FRONTENDS = "v1/frontends/"  # with a `FrontendRecord`
EVENT_CHANNELS = "v1/event_channels/"
CLEAR_KV_BLOCKS = "clear_kv_blocks"  # an endpoint that each worker serves besides its own
KV_EVENTS_REPLAY = "kv_events_replay"  # likewise
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_GENERATION = re.compile("[0-9a-f]{8}")
_SCHEME = "dyn://"


def is_name(text: str) -> bool:
    """Return whether a namespace, component or endpoint may be called so."""
    return _NAME.fullmatch(text) is not None


def covers_namespace(own: str, other: str) -> bool:
    """Return True if a process of namespace `own` serves the workers of `other`; an empty `own` covers all.

    An orchestrator that replaces the workers of `a` puts the new generation into `a-` and eight hexadecimal digits:
    workers of two generations never exchange blocks, and frontends serve both.
    """
    is_generation = other.startswith(f"{own}-") and _GENERATION.fullmatch(other, len(own) + 1)
    return own in ("", other) or bool(is_generation)


class EndpointName(msgspec.Struct, frozen=True, order=True):
    """The name of an endpoint, in three parts. A namespace may be nested (`a.b`)."""

    namespace: str
    component: str
    endpoint: str

    @classmethod
    def parse(cls, url: str) -> "EndpointName":
        """Parse `dyn://namespace.component.endpoint`, also without `dyn://`. Raises ConfigError for anything else."""
        parts = url.removeprefix(_SCHEME).rsplit(".", 2)
        if len(parts) != 3 or not all(map(is_name, parts)):
            raise errors.ConfigError(
                f"{url!r} is no endpoint: expected dyn://namespace.component.endpoint, of a-z, 0-9, - and _"
            )
        return cls(*parts)

    @property
    def path(self) -> str:
        """The name as a part of a key."""
        return f"{self.namespace}/{self.component}/{self.endpoint}"

    def __str__(self) -> str:
        return f"{_SCHEME}{self.namespace}.{self.component}.{self.endpoint}"


class Instance(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="Endpoint"):
    """One process that serves one endpoint. `transport` maps a request plane's name to the address there."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    transport: dict[str, str]
    request_plane_codec: str = "msgpack"

    @property
    def name(self) -> EndpointName:
        return EndpointName(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> str:
        """The key of this record in discovery."""
        return f"{INSTANCES}{self.name.path}/{self.instance_id:x}"

    @property
    def card_key(self) -> str:
        """The key in discovery of the card of the model that this instance serves."""
        return f"{CARDS}{self.name.path}/{self.instance_id:x}"


class EventChannel(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="EventChannel"):
    """A publisher of events. `transport` maps an event plane's name to the publisher's address there."""

    topic: str  # {namespace}/{component}/{event}
    instance_id: int
    transport: dict[str, str]

    @property
    def key(self) -> str:
        """The key of this record in discovery."""
        return f"{EVENT_CHANNELS}{self.topic}/{self.instance_id:x}"


def owner_of(key: str) -> int | None:
    """Return the instance that put an instance, a card or an event channel into discovery; None for other keys."""
    if not key.startswith((INSTANCES, CARDS, EVENT_CHANNELS)):
        return None
    try:
        return int(key.rpartition("/")[2], 16)
    except ValueError:
        return None


class SleepingInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has released its engine's memory, and serves again once an operator wakes it."""

    instance_id: int
    role: str  # aggregated, prefill or decode
    endpoint: str


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is starting, or asleep, and its estimate of how long its start takes in all."""

    model: str
    namespace: str
    estimate_s: float
    is_on_demand: bool = False  # it starts when a request waits for it
    context_length: int | None = None  # of a model that is listed though no worker serves it
    failure: str = ""  # why its last start failed: requests do not wait for it
    phase: str = ""  # of a model that is listed: unloaded, loading, loaded, unloading
    is_pinned: bool = False  # it stays loaded
    loader: int = 0  # the instance that takes a `ModelChange` for it; 0: none
    sleeper: SleepingInstance | None = None

    @property
    def answers_requests(self) -> bool:
        """Return whether requests may wait for it: a prefill worker answers none."""
        return self.sleeper is None or self.sleeper.role != "prefill"

    @property
    def can_be_woken(self) -> bool:
        """Return whether the model may lack workers on purpose; not if its last start failed."""
        is_listed = self.is_on_demand or self.context_length is not None
        return (
            (is_listed or self.sleeper is not None) and self.answers_requests and not self.failure
        )


ModelAction = Literal["load", "unload", "pin", "unpin"]


class ModelChange(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that loads a model on demand is to do with it; its endpoint is `loader_endpoint`."""

    model: str
    action: ModelAction


def loader_endpoint(namespace: str) -> EndpointName:
    """Return the endpoint of the processes that load models on demand."""
    return EndpointName(namespace, "models", "change")


class FrontendRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process that answers HTTP requests at `url`, as the host of this name sees it; several may share one port."""

    instance_id: int
    namespace: str  # of the workers that it serves; empty: all
    host: str
    url: str
    router_mode: str
    is_draining: bool = False

    @property
    def key(self) -> str:
        return f"{FRONTENDS}{self.instance_id:x}"
