"""Ports: who gets one, and who has it already."""

from __future__ import annotations

import os
import socket

import pytest

from diloco_common.errors import ConfigError, InUse
from diloco_common.wire.addresses import bind_socket, bound_address, who_listens


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
