"""Addresses: what is understood, what is refused, and who has a port."""

from __future__ import annotations

import os
import socket

import pytest

from diloco_common.addresses import bind_socket, bound_address, is_loopback, parse_address, who_listens
from diloco_common.errors import ConfigError, InUse


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("ps-0:0", "ps-0", 0),
        ("ps_0.internal:65535", "ps_0.internal", 65535),
        ("[::1]:50051", "::1", 50051),
        ("[::]:1", "::", 1),
    ],
)
def test_an_address_is_parsed_and_written_back(text, host, port):
    address = parse_address(text)

    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "port is missing"),
        ("localhost", "port is missing"),
        (":50051", "host is missing"),
        ("localhost:", "number from 0 to 65535"),
        ("localhost:65536", "number from 0 to 65535"),
        ("localhost:-1", "number from 0 to 65535"),
        ("localhost:http", "number from 0 to 65535"),
        ("localhost:٣", "number from 0 to 65535"),
        ("::1:50051", "needs brackets"),
        ("[localhost]:50051", "no IPv6 address"),
        ("http://localhost:50051", "scheme"),
        ("a b:1", "letters, digits"),
        ("a/../b:1", "letters, digits"),
        ("\x1b[31m:1", "letters, digits"),
    ],
)
def test_nonsense_is_refused_with_the_reason_and_an_example(text, why):
    with pytest.raises(ConfigError, match=why) as refused:
        parse_address(text)

    assert "127.0.0.1:50051" in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("ps-0", False),
    ],
)
def test_only_hosts_that_nobody_else_can_reach_are_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_port_0_gives_a_free_port_that_can_be_connected_to():
    with bind_socket("127.0.0.1:0") as sock:
        address = bound_address(sock)

        assert address.port != 0
        socket.create_connection((address.host, address.port), timeout=5).close()


def test_a_port_in_use_is_reported_with_the_process_that_has_it():
    with bind_socket("127.0.0.1:0") as first:
        address = str(bound_address(first))

        with pytest.raises(InUse) as refused:
            bind_socket(address)

    assert address in str(refused.value)
    if os.path.exists("/proc/net/tcp"):
        assert f"process {os.getpid()} (" in str(refused.value)


def test_nobody_listens_on_a_port_that_is_bound_but_not_listening():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))

        assert who_listens(sock.getsockname()[1]) is None


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="no interface of this machine"):
        bind_socket("192.0.2.1:0")  # a documentation address: nobody has it
