"""The section `milvus` of the semantic cache: the original's keys, and what of them can be used.

The fields of type `dict` are read and have no effect: no lookup searches by vector.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors

MOST_ENTRIES = 16_384  # rows that one query of Milvus returns


class MilvusAuth(msgspec.Struct, frozen=True, kw_only=True):
    """The user that Milvus knows the router by."""

    enabled: bool = False
    username: str = ""
    password: str = ""


class MilvusTls(msgspec.Struct, frozen=True, kw_only=True):
    """Files of TLS: the authority of Milvus's certificate, and the router's own certificate with its key."""

    enabled: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class MilvusConnection(msgspec.Struct, frozen=True, kw_only=True):
    """The address of Milvus; `timeout` are the seconds of a connection, a write and a deletion."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.:_-]+$")] = "localhost"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 19530
    database: str = ""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    auth: MilvusAuth = MilvusAuth()
    tls: MilvusTls = MilvusTls()


class MilvusCollection(msgspec.Struct, frozen=True, kw_only=True):
    """The collection of the answers."""

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,254}$")] = "semantic_cache"
    description: str = ""
    vector_field: dict[str, Any] = {}
    index: dict[str, Any] = {}


class MilvusSearch(msgspec.Struct, frozen=True, kw_only=True):
    """How recent the writes of others are that a lookup sees."""

    consistency_level: Literal["Strong", "Session", "Bounded", "Eventually"] = "Session"
    params: dict[str, Any] = {}
    topk: int = 10


class MilvusDevelopment(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an absent collection is made."""

    drop_collection_on_startup: bool = False
    auto_create_collection: bool = True
    verbose_errors: bool = True


class MilvusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in Milvus. `lookup_timeout_seconds`, a key of our own, is the most that a request waits for it."""

    connection: MilvusConnection = MilvusConnection()
    collection: MilvusCollection = MilvusCollection()
    search: MilvusSearch = MilvusSearch()
    development: MilvusDevelopment = MilvusDevelopment()
    performance: dict[str, Any] = {}
    data_management: dict[str, Any] = {}
    logging: dict[str, Any] = {}
    lookup_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 0.25


def check(milvus: MilvusSettings | None, max_entries: int, directory: str) -> None:
    """Raise ConfigError for settings with which answers cannot be kept in Milvus."""
    path = "semantic_cache.milvus"
    if milvus is None:
        raise errors.ConfigError(
            "semantic_cache.backend_type: milvus needs the section semantic_cache.milvus, or backend_config_path, "
            "the file of it"
        )
    if directory:
        raise errors.ConfigError(
            "semantic_cache.directory: expected none, Milvus keeps the answers"
        )
    if max_entries > MOST_ENTRIES:
        raise errors.ConfigError(
            f"semantic_cache.max_entries: expected at most {MOST_ENTRIES}, which Milvus lists at once, "
            f"got {max_entries}"
        )
    if milvus.development.drop_collection_on_startup:
        raise errors.ConfigError(
            f"{path}.development.drop_collection_on_startup: not supported here, because other routers share the "
            "collection; set it to false"
        )
    auth, tls = milvus.connection.auth, milvus.connection.tls
    if auth.enabled and not (auth.username and auth.password):
        raise errors.ConfigError(f"{path}.connection.auth: expected username and password")
    if bool(tls.cert_file) != bool(tls.key_file) or (tls.cert_file and not tls.ca_file):
        raise errors.ConfigError(
            f"{path}.connection.tls: expected ca_file beside cert_file and key_file"
        )
    for file in (tls.ca_file, tls.cert_file, tls.key_file) if tls.enabled else ():
        if file and not Path(file).is_file():
            raise errors.ConfigError(f"{path}.connection.tls: no such file: {file}")
