"""An address is written and read in one notation, and an IPv6 address in brackets."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import addresses, errors

HOSTS = st.one_of(
    st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)
)


@given(HOSTS, st.integers(0, 65535))
def test_split_undoes_join(host, port):
    assert addresses.split(addresses.join(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:65536", "host:-1", "host:²"])
def test_text_without_host_or_port_is_refused(text):
    with pytest.raises(ValueError, match="expected host:port"):
        addresses.split(text)


def test_brackets_around_a_host_are_taken_off():
    assert addresses.plain_host("[fd77::3]", "DYN_TCP_RPC_HOST") == "fd77::3"
    assert addresses.plain_host("10.0.0.1", "DYN_TCP_RPC_HOST") == "10.0.0.1"


@pytest.mark.parametrize("host", ["fe80::1%eth0", "FE80::1"])
def test_address_of_a_single_link_is_refused_by_the_name_of_its_setting(host):
    with pytest.raises(errors.ConfigError, match=f"DYN_TCP_RPC_HOST.*{host}"):
        addresses.plain_host(host, "DYN_TCP_RPC_HOST")


def test_family_of_a_number_needs_no_resolver():
    assert addresses.resolve("::1") == (socket.AF_INET6, "::1")
    assert addresses.resolve("127.0.0.1") == (socket.AF_INET, "127.0.0.1")
    assert addresses.resolve("localhost")[1] in ("::1", "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "first", "last"), [("0", 0, 0), ("7000", 7000, 7000), ("7000-7099", 7000, 7099)]
)
def test_port_range_is_read_and_written_in_one_notation(text, first, last):
    ports = addresses.PortRange.parse(text)

    assert ports == addresses.PortRange(first, last)
    assert str(ports) == text


@pytest.mark.parametrize(
    "text", ["", "-1", "65536", "7099-7000", "0-7000", "7000-", "any", "7000-7001-7002"]
)
def test_text_that_is_no_port_range_is_refused(text):
    with pytest.raises(ValueError, match=r"port|invalid literal"):
        addresses.PortRange.parse(text)


@pytest.mark.parametrize("host", ["a..b", ".local", f"{'x' * 64}.local"])
def test_name_that_no_host_can_have_is_an_error_of_the_system(host):
    with pytest.raises(OSError, match="no name of a host"):
        addresses.resolve(host)
