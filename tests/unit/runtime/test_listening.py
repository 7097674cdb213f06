"""A listener takes the first free port of its range, and is published where others reach it."""

import contextlib
import socket

import pytest

from dynamo.base import addresses, errors
from dynamo.runtime import listening
from waiting import PATIENT_S


def test_first_free_port_of_a_range_is_listened_on():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        at = listening.ListenAddress(ports=addresses.PortRange(port, min(port + 50, 65535)))
        with at.listen() as bound:
            assert port < bound.getsockname()[1] <= port + 50


def test_range_without_a_free_port_is_refused_by_the_names_of_its_settings():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        at = listening.ListenAddress(ports=addresses.PortRange(port, port), setting="DYN_EVENT_")
        with pytest.raises(
            errors.ConfigError, match=rf"127.0.0.1:{port}.*DYN_EVENT_HOST, DYN_EVENT_PORT"
        ):
            at.listen()


@pytest.mark.parametrize(
    ("advertised", "expected"),
    [
        (None, "10.0.0.7:7003"),
        ("203.0.113.9", "203.0.113.9:7003"),
        ("203.0.113.9:17000-17009", "203.0.113.9:17003"),
        ("nat.example", "nat.example:7003"),
        ("fd77::9", "[fd77::9]:7003"),
        ("[fd77::9]", "[fd77::9]:7003"),
        ("[fd77::9]:17000-17009", "[fd77::9]:17003"),
    ],
)
def test_listener_is_published_at_its_advertised_address(advertised, expected):
    at = listening.ListenAddress(
        host="10.0.0.7", ports=addresses.PortRange(7000, 7009), advertised=advertised
    )

    assert at.checked().published(7003) == expected


@pytest.mark.parametrize(
    ("host", "ports", "advertised"),
    [
        ("0.0.0.0", "7000", None),
        ("*", "7000", "203.0.113.9"),
        ("0.0.0.0", "7000", "0.0.0.0"),
        ("0.0.0.0", "0", "203.0.113.9:17000"),
        ("0.0.0.0", "7000-7009", "203.0.113.9:17000"),
        ("0.0.0.0", "7000", "203.0.113.9:nine"),
    ],
)
def test_address_by_which_nobody_could_reach_the_listener_is_refused(host, ports, advertised):
    at = listening.ListenAddress(
        host=host, ports=addresses.PortRange.parse(ports), advertised=advertised
    )
    with pytest.raises(errors.ConfigError, match=r"DYN_TCP_RPC_(HOST|ADVERTISE)"):
        at.checked()


def test_found_ports_are_free_and_outside_the_systems_range():
    first = listening.find_free_ports(3)

    assert first in listening.PORT_RANGE
    for port in range(first, first + 3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_ports_in_use_are_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(listening, "PORT_RANGE", range(port, port + 2))

        with pytest.raises(errors.ConfigError, match="no 1 consecutive free ports"):
            listening.find_free_ports(1)


def test_a_reserved_port_is_found_by_nobody_else_but_can_be_listened_on(monkeypatch):
    with contextlib.ExitStack() as reservations:
        port = listening.reserve_ports(1, reservations)
        monkeypatch.setattr(listening, "PORT_RANGE", range(port, port + 2))

        with pytest.raises(errors.ConfigError, match="no 1 consecutive free ports"):
            listening.find_free_ports(1)
        with pytest.raises(errors.ConfigError, match="no 1 consecutive free ports"):
            listening.reserve_ports(1, reservations)
        with socket.create_server(("127.0.0.1", port)) as server:
            reservations.close()
            with socket.create_connection(server.getsockname(), timeout=PATIENT_S):
                server.accept()[0].close()


def test_name_that_no_host_can_have_is_refused_for_the_system_port():
    with pytest.raises(errors.ConfigError, match=r"'a\.\.b' is no address of this machine: enc"):
        listening.open_listener("a..b", 0, port_flag="--system-port")
