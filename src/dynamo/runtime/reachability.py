"""Addresses that hosts beside this one reach: what a process publishes where discovery runs on another host."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from dynamo.base import addresses, distribution, errors, membership
from dynamo.runtime import listening
from dynamo.runtime.backends.etcd import access as etcd_access
from dynamo.runtime.component import RuntimeConfig

_logger = logging.getLogger(__name__)
Settings = TypeVar("Settings", bound=RuntimeConfig)


def with_reachable_host(
    settings: Settings, environ: Mapping[str, str], *, exports_blocks: bool = False
) -> Settings:
    """Return the settings of a process that serves others, with an address at which hosts beside this one reach it.

    An address of this host alone, published in an etcd or a cluster on another host, would be listed and answer nobody.
    It is replaced by that of the interface that leads there. Raises ConfigError if nothing would protect that address.
    `exports_blocks`: others connect for KV blocks, even if requests and events go over NATS.
    """
    own = addresses.plain_host(settings.tcp_rpc_host, "DYN_TCP_RPC_HOST")
    if settings.event_plane == "zmq":
        host, advertised = settings.event_host, settings.event_advertise
        warn_of_loopback(settings, environ, host, advertised, setting="DYN_EVENT_")
    if settings.tcp_rpc_advertise is not None:
        warn_of_loopback(
            settings, environ, None, settings.tcp_rpc_advertise, setting="DYN_TCP_RPC_"
        )
        return settings
    if not _is_of_this_host(own):
        return settings
    way = _way_to_discovery(settings, environ)
    if way is None:
        return settings
    name = settings.discovery_backend
    credentials = membership.read(settings, environ)
    if not (credentials.has_cluster_token or credentials.tls or credentials.is_insecure):
        if settings.request_plane == settings.event_plane == "nats" and not exports_blocks:
            return settings  # no process connects to it
        raise errors.ConfigError(
            f"{name} at {way.target} is on another host, and processes there cannot reach {own}: expected"
            f" DYN_TCP_RPC_HOST (it could be {way.source}), with a cluster token (--cluster-token-file) or certificates"
        )
    _logger.info(
        "others reach this process at %s, which leads to %s (DYN_TCP_RPC_HOST)", way.source, name
    )
    return dataclasses.replace(settings, tcp_rpc_host=way.source)


def warn_of_loopback(
    settings: RuntimeConfig,
    environ: Mapping[str, str],
    host: str | None,
    advertised: str | None,
    *,
    setting: str,
) -> None:
    """Say that only this host reaches an address which a user gave, though discovery is on another one.

    `host` and `advertised` are those of `listening.ListenAddress`, and so is `setting`.
    """
    variable, text = f"{setting}HOST", host
    if advertised is not None:
        variable, text = f"{setting}ADVERTISE", advertised
        host = listening.ListenAddress(advertised=advertised, setting=setting).hosts[1]
    if host is None or not _is_of_this_host(addresses.plain_host(host, variable)):
        return
    if way := _way_to_discovery(settings, environ):
        _logger.warning(
            "%s=%s: only processes of this host reach it, but %s at %s is on another; %s would be reached from there",
            variable, text, settings.discovery_backend, way.target, way.source,
        )  # fmt: skip


class _Way(NamedTuple):
    """The way to discovery on another host."""

    source: str  # the address of the interface that leads there
    target: str  # host and port of discovery


def _way_to_discovery(settings: RuntimeConfig, environ: Mapping[str, str]) -> _Way | None:
    """Return the way to discovery; None if it is on this host. Raises ConfigError."""
    target = _discovery_address(settings, environ)
    if target is None:
        return None
    host, port = addresses.split(target)
    try:
        reached, source = addresses.resolve(host)[1], addresses.source_address(host, port)
    except OSError:
        return None  # the client of discovery says what is wrong with its address
    is_here = membership.is_loopback(reached) or source == reached
    return None if is_here else _Way(source, target)


def _discovery_address(settings: RuntimeConfig, environ: Mapping[str, str]) -> str | None:
    """Return the host and port of discovery, if it may be on another host. Raises ConfigError."""
    if settings.discovery_backend == "etcd":
        return etcd_access.read(settings.etcd_endpoints, environ).addresses[0]
    if settings.discovery_backend == "kubernetes":
        module = distribution.load_extra(
            "dynamo.runtime.backends.kubernetes.access",
            feature="kubernetes discovery",
            extra="kubernetes",
        )
        return str(module.read_api_address(environ))
    return None


def _is_of_this_host(host: str) -> bool:
    """Return whether only this host reaches the address; Debian lets the host's own name mean 127.0.1.1."""
    try:
        return membership.is_loopback(addresses.resolve(host)[1])
    except OSError:
        return False  # whoever listens there says what is wrong
